"""How long a policy version takes from its announcement until every rollout server serves it. No clock."""

from collections import OrderedDict

MOST = 64
"""Versions that may be on their way: one that no server ever serves is forgotten with time."""


class UpdateLatency:
    """Of the newest version that every server has served."""

    def __init__(self) -> None:
        self._announced: OrderedDict[int, float] = OrderedDict()
        self.version: int | None = None
        self.seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether a version is on its way."""
        return bool(self._announced)

    def announced(self, version: int, now: float) -> None:
        """The learner has handed a version to the bus; again after a restart that repeats it."""
        self._announced.pop(version, None)
        self._announced[version] = now
        if len(self._announced) > MOST:
            self._announced.popitem(last=False)

    def serve(self, least: int, now: float) -> None:
        """Every server serves this version or a newer one."""
        arrived = [version for version in self._announced if version <= least]
        if arrived:
            self.version = max(arrived)
            self.seconds = now - self._announced[self.version]
        for version in arrived:
            del self._announced[version]

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl; none before the first."""
        if self.version is None:
            return {}
        return {
            "weight_sync/update_latency_s": self.seconds,
            "weight_sync/update_latency_version": float(self.version),
        }
