"""Compare arms: pretrain each, probe each, and write a report. See configs/experiments."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import warnings
from pathlib import Path

# Python puts this folder first on the path, where "pretrain" and "train" would be scripts.
sys.path[0] = str(Path(__file__).resolve().parents[1])

# What mmseg says about optional parts of itself is nothing to begin a report with.
warnings.filterwarnings('ignore', module='mmcv')
with contextlib.redirect_stdout(io.StringIO()):
    from dense.comparison import load
    from dense.jobs import execute
    from dense.report import write_report
    from dense.runs import describe, plan
    from skipless.command_line import parse_options, run_command


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', type=Path, help='comparison config')
    parser.add_argument('--work-dir', type=Path, help='default: work_dirs/<name of the config>')
    parser.add_argument('--jobs', type=int, help="runs at a time, sharing the cores; default: the config's jobs")
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='key=value, overrides the config'
    )
    return parser.parse_args()


def main() -> int:
    try:
        return run_command(compare, parse_args())
    except KeyboardInterrupt:
        print('interrupted; what has finished is kept, the same command goes on from there', file=sys.stderr)
        return 130


def compare(args: argparse.Namespace) -> None:
    comparison = load(args.config, parse_options(args.cfg_options))
    work_dir = (args.work_dir or Path('work_dirs') / args.config.stem).resolve()
    runs = plan(comparison, work_dir)
    print(f'{comparison.title}: {describe(runs)} in {work_dir}', flush=True)
    jobs = comparison.jobs if args.jobs is None else args.jobs
    outcome = execute(runs, work_dir, Path(__file__).resolve().parent, jobs, sys.stdout)
    print('writing the report', flush=True)
    report = write_report(comparison, runs, work_dir, 'python ' + shlex.join(sys.argv))
    print(f'\n{report.text}\n\nreport: {report.page}')
    if not outcome.complete:
        sys.exit(1)


if __name__ == '__main__':
    sys.exit(main())
