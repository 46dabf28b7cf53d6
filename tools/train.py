"""Stage 2: train a dense-prediction model on a pretrained ViT.

python tools/train.py configs/dense/NAME.py [--work-dir DIR] [--resume] [--amp] [--cfg-options key=value ...]
"""

import sys
from pathlib import Path
from typing import Any

# So that the packages are found from a checkout that was not installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from dense.launch import train  # noqa: E402
from skipless.command_line import parse_options, run_command, training_words  # noqa: E402


def main(cfg_options: list[str], **words: Any) -> None:
    train(cfg_options=parse_options(cfg_options), **words)


if __name__ == '__main__':
    words = training_words('Train a dense-prediction model on a pretrained ViT', ('none', 'pytorch', 'slurm', 'mpi'))
    raise SystemExit(run_command(main, **words))
