#!/usr/bin/env bash
# Rollout side: rollout servers, each until the run ends. Start it before or after the learner.
#
#   bash scripts/start_rollout_nodes.sh [--servers N] [--config FILE_OR_PRESET] [--set a.b=c ...]  on this host
#   bash scripts/start_rollout_nodes.sh --hosts FILE [--dry-run] ...                               every rollout node, over ssh
#   bash scripts/start_rollout_nodes.sh --slurm [--dry-run] [--out FILE] ...                       a file for sbatch
#   bash scripts/start_rollout_nodes.sh --kubernetes [--dry-run] [--out FOLDER] [--image I] ...    manifests of a JobSet
#
# On this host REPLAY is the address of replay (default tcp://127.0.0.1:5757), server I of N gets the GPUs of the
# placement's engine I, and other arguments go to `python -m rollout_server.main`. Elsewhere they go to
# `python -m learner.launch rollout`. Give the same --config, --seed and --set as to the learner.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
for argument in "$@"; do
  case "$argument" in
    --hosts | --hosts=* | --slurm | --kubernetes) exec "$python" -m learner.launch rollout "$@" ;;
  esac
done
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
  "$python" -m learner.launch.hosts.server --index "$i" -- --replay "${REPLAY:-tcp://127.0.0.1:5757}" --parent $$ \
    --server-name "rollout-$(hostname)-$$-$i" "${arguments[@]}" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
done
exit "$status"
