#!/usr/bin/env bash
# Every check and every test: scripts/test.sh [--all] [arguments of pytest]
#
#   scripts/test.sh                 static checks and the default tests, in two lanes (tests/lanes.py)
#   scripts/test.sh --all           the tests marked slow as well, in three: campaigns of faults, whole benchmarks, mutants
#   scripts/test.sh tests/replay    arguments go to pytest, in one lane
#
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

selection=()
lanes=2
if [ "${1:-}" = --all ]; then
    shift
    selection=(-m "" --durations 40)
    lanes=3 # what is slow mostly waits
fi
whole=()
rules=()
if [ $# -eq 0 ]; then
    whole=(-p tests.lanes -n "$lanes" --dist loadscope --no-loadscope-reorder)
    rules=(--no-rules) # pytest runs them below
fi
checks=0
bash scripts/check.sh "${rules[@]}" || checks=$?
tests=0
"$SLIPSTREAM_PYTHON" -m pytest "${selection[@]}" "${whole[@]}" "$@" || tests=$?
if [ "$tests" -ne 0 ]; then exit "$tests"; fi
exit "$checks"
