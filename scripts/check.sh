#!/usr/bin/env bash
# Static checks: lint, format, types, and the rules of the house (layering, sizes). Names those that failed.
# --no-rules leaves the rules out, where pytest runs them anyway.
# Uses $SLIPSTREAM_PYTHON, or .venv where there is one, or python3.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

python="${SLIPSTREAM_PYTHON:-}"
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
failed=()
check() {
    local name="$1"
    shift
    printf 'check: %s\n' "$name"
    "$@" || failed+=("$name")
}
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
if [ "${1:-}" != --no-rules ]; then
    check "rules" "$python" -m pytest tests/test_layering.py tests/test_sizes.py tests/security/test_no_code.py
fi
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'check.sh: failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
