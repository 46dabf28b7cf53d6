"""How well a ViT is conditioned, block by block: tokens, attention, gradients and Jacobians. See docs/conditioning.md.

python tools/diagnose.py MODEL_OR_CKPT --out DIR [--images DIR] [--model-options key=value ...]
"""

import sys
from functools import partial
from pathlib import Path

# So that the packages are found from a checkout that was not installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm  # noqa: E402

from skipless.command_line import run_command  # noqa: E402
from skipless.conditioning.command import diagnose_words, run  # noqa: E402

if __name__ == '__main__':
    words = diagnose_words('Measure how well a ViT is conditioned, block by block')
    bar = partial(tqdm, desc='diagnose', unit='block', dynamic_ncols=True)
    raise SystemExit(run_command(run, **words, progress=bar, say=print))
