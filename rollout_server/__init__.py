"""Rollout server: lease a prompt, generate, score, send the group. One process per engine."""

from slipstream.runtime.packages import require_ours

require_ours()
