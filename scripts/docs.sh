#!/usr/bin/env bash
# The documentation as a site: scripts/docs.sh [--serve] [--to DIR]
#
#   scripts/docs.sh               builds build/site; a broken link, a lost heading or a page without a place is an error
#   scripts/docs.sh --to DIR      builds another folder
#   scripts/docs.sh --serve       shows it at http://127.0.0.1:8000, and again after every change of a page
#
# Uses $SLIPSTREAM_PYTHON; without it .venv, into which scripts/install.sh puts the extra docs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

serve= to=build/site
while (($#)); do
  case "$1" in
    --serve) serve=yes; shift ;;
    --to) to="${2:?docs.sh: --to needs a folder}"; shift 2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "docs.sh: unknown argument '$1' (there are --serve and --to DIR)" >&2; exit 2 ;;
  esac
done
if [[ -z "${SLIPSTREAM_PYTHON:-}" ]]; then
  bash scripts/install.sh --venv .venv docs
  SLIPSTREAM_PYTHON="$PWD/.venv/bin/python"
fi
export NO_MKDOCS_2_WARNING=1 # a notice about another program, on every build
if [[ -n "$serve" ]]; then
  exec "$SLIPSTREAM_PYTHON" -m mkdocs serve --strict
fi
exec "$SLIPSTREAM_PYTHON" -m mkdocs build --strict --site-dir "$(realpath -m "$to")"
