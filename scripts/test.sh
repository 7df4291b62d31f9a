#!/usr/bin/env bash
# Every check and every test: scripts/test.sh [arguments of pytest]
#
# In two lanes: -p tests.lanes -n 2 --dist loadscope --no-loadscope-reorder (tests/lanes.py).
# Sets itself up on a fresh machine: without $SLIPSTREAM_PYTHON, .venv is made by scripts/install.sh (quick when it is
# up to date). Tests run also when a static check has failed. pytest's closing line is the last line and its exit code
# that of the script; where pytest passes, the exit code is that of the checks. No test collected is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1
if [ -z "${SLIPSTREAM_PYTHON:-}" ]; then
    bash scripts/install.sh --venv .venv dev
    SLIPSTREAM_PYTHON="$PWD/.venv/bin/python"
    # SGLang's tests on a CPU need a CPU build of torch; they say so and skip where there is another one
    if [ -z "$("$SLIPSTREAM_PYTHON" -c 'import torch; print(torch.version.cuda or torch.version.hip or "")')" ]; then
        bash scripts/install.sh --venv .venv dev,sglang-cpu
    fi
fi
export SLIPSTREAM_PYTHON

checks=0
bash scripts/check.sh || checks=$?
tests=0
"$SLIPSTREAM_PYTHON" -m pytest "$@" || tests=$?
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
exit "$checks"
