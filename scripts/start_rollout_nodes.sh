#!/usr/bin/env bash
# Rollout side: rollout servers, each until the run ends. Start it before or after the learner.
#
#   bash scripts/start_rollout_nodes.sh [--servers N] [--config FILE_OR_PRESET] [--set a.b=c ...]  on this host
#   bash scripts/start_rollout_nodes.sh --hosts FILE [--dry-run] ...                               every rollout node, over ssh
#   bash scripts/start_rollout_nodes.sh --slurm [--dry-run] [--out FILE] ...                       a file for sbatch
#   bash scripts/start_rollout_nodes.sh --kubernetes [--dry-run] [--out FOLDER] [--image I] ...    manifests of a JobSet
#
# The same as `python -m slipstream.launch rollout`. On this host REPLAY is the address of replay, and server I of N gets
# the GPUs of the placement's engine I. Give the same --config, --seed and --set as to the learner.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}" -m slipstream.launch rollout "$@"
