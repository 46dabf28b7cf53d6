#!/usr/bin/env bash
# Lint, types and tests, in an environment that is made on the first call. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash tools/setup.sh)
# Tests run in parallel processes of one thread each.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -n "${SKIPLESS_TEST_PROCESSES:-2}" "$@"
