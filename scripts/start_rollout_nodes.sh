#!/usr/bin/env bash
# Rollout node: one rollout server after another until the run ends. Start it before or after the learner.
#
#   bash scripts/start_rollout_nodes.sh [--servers N] [--config FILE_OR_PRESET] [--set a.b=c ...]
#
# REPLAY is the address of replay (default tcp://127.0.0.1:5757). Other arguments go to
# `python -m rollout_server.main`; give the same --config, --seed and --set as to the learner.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

servers=1
arguments=()
while (($#)); do
  case "$1" in
    --servers) servers="$2"; shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true; wait || true; exit 130' INT TERM
for ((i = 0; i < servers; i++)); do
  "$python" -m rollout_server.main --replay "${REPLAY:-tcp://127.0.0.1:5757}" --parent $$ \
    --server-name "rollout-$(hostname)-$$-$i" "${arguments[@]}" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
done
exit "$status"
