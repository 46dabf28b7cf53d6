"""Stage 2: evaluate a checkpoint of tools/train.py.

python tools/test.py configs/dense/NAME.py CKPT [--work-dir DIR] [--out DIR] [--show-dir DIR] [--tta]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

# So that the packages are found from a checkout that was not installed.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from dense.launch import evaluate  # noqa: E402
from skipless.command_line import parse_options, run_command  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Evaluate a dense-prediction model')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--work-dir', help='where test_summary.json goes (default: work_dirs/<config name>)')
    parser.add_argument('--out', metavar='DIR', help='write predictions there, as PNG')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='write pictures of predictions and truth there')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds a shown prediction stays (default: 2)')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='change config values')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(cfg_options: list[str], **words: Any) -> None:
    evaluate(cfg_options=parse_options(cfg_options), **words)


if __name__ == '__main__':
    words = vars(parse_args())
    words.pop('local_rank')
    raise SystemExit(run_command(main, **words))
