#!/usr/bin/env bash
# The main job on embedded data: pretrain with and without skips, probe, and write report/index.html.
# Arguments go to tools/compare.py. A second run reuses what is finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash tools/setup.sh)
exec "$python" tools/compare.py configs/experiments/quickstart.py --work-dir work_dirs/quickstart --jobs 2 "$@"
