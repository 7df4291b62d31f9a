"""Rewards: functions that judge answers, and the pool of killable processes that they run in.

`RewardPool` is imported on first use: worker processes import this package too, start anew after every timeout,
and have no use for the configuration and asyncio.
"""

from typing import TYPE_CHECKING, Any

from rollout_server.rewards.base import RewardError, RewardOutcome, Sample

if TYPE_CHECKING:
    from rollout_server.rewards.pool import RewardPool

__all__ = ["RewardError", "RewardOutcome", "RewardPool", "Sample"]


def __getattr__(name: str) -> Any:
    if name == "RewardPool":
        from rollout_server.rewards.pool import RewardPool

        return RewardPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
