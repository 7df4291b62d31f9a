#!/usr/bin/env bash
# Learner side: replay and the learner ranks. Rollout servers are started with start_rollout_nodes.sh.
#
#   bash scripts/start_learner.sh [--config FILE_OR_PRESET] [--async-lag N] [--set a.b=c ...]    on this host
#   bash scripts/start_learner.sh --hosts FILE [--dry-run] [--resume RUN_DIR] ...                every learner node, over ssh
#   bash scripts/start_learner.sh --slurm [--dry-run] [--out FILE] ...                           a file for sbatch
#   bash scripts/start_learner.sh --kubernetes [--dry-run] [--out FOLDER] [--image I] ...        manifests of a JobSet
#
# The same as `python -m slipstream.launch learner`, whose --help has the rest; docs/tutorials/machines.md explains all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}" -m slipstream.launch learner "$@"
