#!/bin/sh
# Set up a virtual environment with torch and this package in editable form. Called by make, with
# PYTHON, VENV, TORCH and TORCH_INDEX in the environment; safe to run again.
set -eu

test -x "$VENV/bin/python" || "$PYTHON" -m venv "$VENV"
python="$VENV/bin/python"
pip="$python -m pip --disable-pip-version-check"

if ! "$python" -c 'import torch' 2>/dev/null; then
    # On Linux the default build of torch brings several GB of CUDA libraries. Take the CPU build
    # from torch's own index, unless this site told pip where to look.
    configured=$($pip config list 2>/dev/null | grep -E 'find-links|index-url' || true)
    if [ "$(uname -s)" = Linux ] && [ -n "$TORCH_INDEX" ] && [ -z "$configured" ] &&
        [ -z "${PIP_FIND_LINKS:-}${PIP_INDEX_URL:-}" ]; then
        $pip install -q --retries 1 --timeout 15 --no-deps --index-url "$TORCH_INDEX" "$TORCH" ||
            echo "tools/install.sh: no CPU build from $TORCH_INDEX, taking the default one" >&2
    fi
    $pip install -q "$TORCH" numpy
fi
$pip install -q -e '.[dev,demo]'
