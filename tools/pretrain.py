"""Stage 1: pretrain a ViT by DINO, MAE or labels.

python tools/pretrain.py configs/pretrain/NAME.py [--work-dir DIR] [--resume] [--cfg-options key=value ...]
"""

import argparse
import sys
from pathlib import Path

# Python puts this folder first on the path, where "pretrain" would be this very script.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.launch import launch  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Pretrain a ViT, with or without skips')
    parser.add_argument('config', help='config file')
    parser.add_argument('--work-dir', help='run directory (default: work_dirs/<config name>)')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CKPT',
        help='continue from the newest readable checkpoint of the run directory, or from CKPT',
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm'], default='none', help='how ranks start')
    parser.add_argument('--amp', action='store_true', help='mixed precision (bfloat16 where the device has it)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='change config values')
    # torchrun's predecessor passes it; ranks are read from the environment.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == '__main__':
    words = vars(parse_args())
    words.pop('local_rank')
    raise SystemExit(launch(**words))
