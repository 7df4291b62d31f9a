#!/usr/bin/env bash
# Learner node: replay and the learner ranks. Rollout servers are started elsewhere, with start_rollout_nodes.sh.
#
#   bash scripts/start_learner.sh [--config FILE_OR_PRESET] [--async-lag N] [--set a.b=c ...]
#
# Replay listens at PORT (default 5757) of network.host. Arguments go to `python -m learner.main`.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${SLIPSTREAM_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
exec "$python" -m learner.main --set placement.local_rollouts=false --set "network.replay_port=${PORT:-5757}" "$@"
