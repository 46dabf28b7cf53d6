"""Stage 1: pretrain a ViT by DINO, MAE or labels.

python tools/pretrain.py configs/pretrain/NAME.py [--work-dir DIR] [--resume] [--cfg-options key=value ...]
"""

import sys
from pathlib import Path

# Python puts this folder first on the path, where "pretrain" would be this very script.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.launch import launch  # noqa: E402
from skipless.command_line import training_words  # noqa: E402

if __name__ == '__main__':
    raise SystemExit(launch(**training_words('Pretrain a ViT, with or without skips', ('none', 'pytorch', 'slurm'))))
