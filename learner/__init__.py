"""Learner: take a batch, update the policy, publish the weights. One process per training device."""

from slipstream.runtime.packages import require_ours

require_ours()
