"""Stage 2: train a dense-prediction model on a pretrained ViT.

python tools/train.py configs/dense/NAME.py [--work-dir DIR] [--resume] [--amp] [--cfg-options key=value ...]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

# So that the packages are found from a checkout that was not installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from dense.launch import train  # noqa: E402
from skipless.command_line import parse_options, run_command  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Train a dense-prediction model on a pretrained ViT')
    parser.add_argument('config', help='config file')
    parser.add_argument('--work-dir', help='run directory (default: work_dirs/<config name>)')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CKPT',
        help='continue from the newest checkpoint of the run directory, or from CKPT',
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='change config values')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    # torchrun's predecessor passes it; ranks are read from the environment.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(cfg_options: list[str], **words: Any) -> None:
    train(cfg_options=parse_options(cfg_options), **words)


if __name__ == '__main__':
    words = vars(parse_args())
    words.pop('local_rank')
    raise SystemExit(run_command(main, **words))
