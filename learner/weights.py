"""From the sharded policy to the weight bus: digests of the shards, one gather, one hand-over.

The digests come from each rank's own shards, before anything is gathered or packed. So when an engine's live
weights show the same digests, gather, pack, wire, load and fusion have all been proven (invariant 5).
"""

import logging
from typing import Any

from configs.schema import Config
from learner.layout import DTYPES, gather_pieces
from learner.policy.model import Policy
from learner.ranks import Ranks
from replay.channel import load_keys
from slipstream.runtime.hang import expired
from weight_bus import PublishReport
from weight_bus.publisher import Publisher

log = logging.getLogger(__name__)


class WeightPublisher:
    """All ranks call `start`; rank 0 owns the publisher."""

    def __init__(self, config: Config, policy: Policy, ranks: Ranks, *, run_id: str, incarnation: int) -> None:
        self.config = config
        self.policy = policy
        self._publisher: Publisher | None = None
        self._is_out = self._evaluates = False
        """A broadcast was started and not waited for."""
        if ranks.is_first:
            self._publisher = Publisher(
                config.weight_bus,
                host=config.network.host,
                run_id=run_id,
                incarnation=incarnation,
                keys=load_keys(config.network.keys),
                insecure=config.network.insecure,
                kept=policy.frozen_digests,
                pack_on_host=not policy.budget.packs_on_device,
            )

    @property
    def address(self) -> str | None:
        """Control address of the bus; None on other ranks."""
        return self._publisher.address if self._publisher else None

    def digests(self) -> dict[str, int]:
        """Digests of the policy in the wire dtype, from the shards (a collective)."""
        return self.policy.shard_digests(self.config.rollout.dtype)

    def start(self, version: int, digests: dict[str, int], *, evaluate: bool) -> None:
        """Gather the policy (a collective) and hand it to the bus thread.

        Raises:
            NonFiniteWeights: a tensor is not finite; nothing of the version is applied.
        """
        self._is_out, self._evaluates = True, evaluate
        dtype = DTYPES[self.config.rollout.dtype]
        if not self.policy.meshes.in_first_replica:
            return  # those that hold rank 0's copy gather it
        tensors = gather_pieces(self.policy.layout, self.policy.shards(), dtype, self.policy.meshes.replica)
        if self._publisher is None:
            for _ in tensors:
                pass  # in the collectives, but nothing is put together here
            return
        self._publisher.start_publish(version, tensors, digests, evaluate=evaluate)

    def wait(self, *, last: bool = False) -> PublishReport | None:
        """Wait for the last broadcast, at most weight_bus.deadline_s; None without one.

        With replay.async_lag above 0 a newer version may take the place of one that a slow engine still receives, so
        unless it is evaluated the step goes on without its report (None).
        """
        was_out, self._is_out = self._is_out, False
        if self._publisher is None or not was_out:
            return None
        may_go_on = self.config.replay.async_lag > 0 and not self._evaluates and not last
        if may_go_on and not self._publisher.settled:
            return None
        report = self._publisher.wait()
        if late := report.late:
            key = "weight_bus.deadline_s"
            what, limit_s = f"version {report.version} to be served", report.seconds["total"]
            said = expired(what, owed_by=late, waited_s=limit_s, key=key, ends=False)
            log.warning("weight bus: %s did not take version %d in time%s", ", ".join(late), report.version, said)
        return report

    def metrics(self, report: PublishReport | None) -> dict[str, Any]:
        """Numbers of the last broadcast for metrics.jsonl; failures are logged."""
        if report is None or self._publisher is None:
            return {}
        taken = ("members", "num_bytes")
        counters = {k: v for k, v in self._publisher.stats().items() if "/" not in k and k not in taken}
        return {
            **numbers_of(report),
            **{f"weight_sync/{phase}_s": s for phase, s in report.seconds.items() if phase != "total"},
            **{f"weight_sync/{name}": value for name, value in counters.items()},
        }

    def close(self) -> None:
        """Leave the bus."""
        if self._publisher is not None:
            self._publisher.close()


def numbers_of(report: PublishReport | None) -> dict[str, Any]:
    """Of a broadcast, if there was one, for metrics.jsonl; failures are logged."""
    if report is None:
        return {}
    for name, reason in report.failed.items():
        log.warning("weight bus: version %d did not reach %r: %s", report.version, name, reason)
    for reason in report.held.values():
        log.info("weight bus: version %d: %s", report.version, reason)
    return {
        "weight_sync/version": report.version,
        "weight_sync/seconds": report.seconds["total"],
        "weight_sync/bytes": report.num_bytes,
        "weight_sync/epoch": report.epoch,
        "weight_sync/members": len(report.served),
        "weight_sync/digests_equal": not report.failed,
    }
