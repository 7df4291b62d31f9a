#!/usr/bin/env bash
# Learner side: replay and the learner ranks. Rollout servers are started with start_rollout_nodes.sh.
#
#   bash scripts/start_learner.sh [--config FILE_OR_PRESET] [--async-lag N] [--set a.b=c ...]    on this host
#   bash scripts/start_learner.sh --hosts FILE [--dry-run] [--resume RUN_DIR] ...                every learner node, over ssh
#   bash scripts/start_learner.sh --slurm [--dry-run] [--out FILE] ...                           a file for sbatch
#   bash scripts/start_learner.sh --kubernetes [--dry-run] [--out FOLDER] [--image I] ...        manifests of a JobSet
#
# Replay listens at PORT (default 5757) of network.host. On this host the arguments go to `python -m learner.main`,
# elsewhere to `python -m learner.launch learner`, whose --help has the rest; docs/launching.md explains all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
for argument in "$@"; do
  case "$argument" in
    --hosts | --hosts=* | --slurm | --kubernetes) exec "$python" -m learner.launch learner "$@" ;;
  esac
done
exec "$python" -m learner.main --set placement.local_rollouts=false --set "network.replay_port=${PORT:-5757}" "$@"
