#!/usr/bin/env bash
# Make the Python environment that the other scripts use, or reuse it, and print the path of its interpreter.
# SKIPLESS_PYTHON names an interpreter to use instead; it must have the packages installed already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${SKIPLESS_PYTHON:-}" ]; then
    if ! command -v "$SKIPLESS_PYTHON" >/dev/null; then
        echo "error: SKIPLESS_PYTHON=$SKIPLESS_PYTHON is no program; name an interpreter, or unset it" >&2
        exit 2
    fi
    echo "$SKIPLESS_PYTHON"
    exit
fi
python=$PWD/.venv/bin/python
stamp=.venv/installed
wanted=$(cksum <pyproject.toml)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! [ -x "$python" ]; then
    base=
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base=$candidate
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "error: no Python >= 3.10 with venv was found; install one, or name one with packages in SKIPLESS_PYTHON" >&2
        exit 1
    fi
    echo "installing into .venv (a few minutes, most of it PyTorch)" >&2
    # Made anew also where making it was interrupted.
    "$python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear .venv
    # Of what pip says, what shows that it gets on; its errors come on their own.
    "$python" -m pip install --disable-pip-version-check --progress-bar off --editable '.[all,dev]' |
        awk '/^ *(Downloading|Using cached) / { print "  " $0; fflush() }
             /^Installing collected/ { print "  unpacking all of them"; fflush() }' >&2
    echo "$wanted" >"$stamp"
fi
echo "$python"
