"""From the sharded policy to the weight bus: digests of the shards, one gather, one hand-over.

The digests come from each rank's own shards, before anything is gathered or packed. So when an engine's live
weights show the same digests, gather, pack, wire, load and fusion have all been proven (invariant 5).
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import Config
from learner.lanes import lanes_of
from learner.layout import (
    DTYPES,
    Shard,
    Spreader,
    carrier,
    digester,
    digests,
    exchanged,
    gather_pieces,
    slice_digests,
    slice_shards,
)
from learner.policy.model import Policy
from learner.ranks import Ranks
from replay.channel import load_keys
from slipstream.runtime.hang import expired
from weight_bus import PublishReport
from weight_bus.digest import Digester
from weight_bus.lane_sender import LaneSender
from weight_bus.lanes import Place
from weight_bus.publisher import Publisher

log = logging.getLogger(__name__)


class WeightPublisher:
    """All ranks call `start`. Rank 0 owns the publisher; with lanes (weight_bus/lanes.py) the others send, too."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        ranks: Ranks,
        *,
        run_id: str,
        incarnation: int,
        shards: list[Shard] | None = None,
    ) -> None:
        """A collective. With `shards`, which lie as the policy's do, these go out in place of its own."""
        self.config = config
        self.policy = policy
        self._own = shards
        self._publisher: Publisher | None = None
        self._sender: LaneSender | None = None
        self._is_out = self._evaluates = False
        """A broadcast was started and not waited for."""
        self._lanes = lanes_of(config, policy)
        self._slices: dict[Place, int] = {}
        """Digests of what the lanes carry, of the last `digests`."""
        self._digester: tuple[list[Shard], list[Place], list[Shard], Digester] | None = None
        self._group, self._on_gpu = policy.meshes.replica, policy.device.type == "cuda"
        options: dict[str, Any] = {
            "host": config.network.host,
            "run_id": run_id,
            "incarnation": incarnation,
            "keys": load_keys(config.network.keys),
            "pack_on_host": not policy.budget.packs_on_device,
            "lanes": self._lanes,
            "from_gpu": self._on_gpu,
        }
        if ranks.is_first:
            insecure, kept = config.network.insecure, policy.frozen_digests
            self._publisher = Publisher(config.weight_bus, insecure=insecure, kept=kept, **options)
        if self._lanes and policy.meshes.in_first_replica:
            self._spreader = Spreader(policy.layout, self._lanes, self._group, on_gpu=self._on_gpu)
            self._enlist(options)

    def _enlist(self, options: dict[str, Any]) -> None:
        """Tell the other ranks where the publisher is; a collective of those that hold one copy of the model."""
        publisher, rank = self._publisher, dist.get_rank(self._group)
        mine = [publisher.address, publisher.session] if publisher is not None else None
        device = carrier(self._shards()[0].local, self._group)
        address, session = next(told for told in exchanged(mine, self._group, device).values() if told)
        if rank and any(lane.sender == rank for lane in self._lanes):
            self._sender = LaneSender(self.config.weight_bus, address=address, session=session, rank=rank, **options)

    def _shards(self) -> list[Shard]:
        return self.policy.shards() if self._own is None else self._own

    @property
    def settled(self) -> bool:
        """Whether no subscriber is waited for; on other ranks than the first nothing is."""
        return self._publisher is None or self._publisher.settled

    @property
    def address(self) -> str | None:
        """Control address of the bus; None on other ranks."""
        return self._publisher.address if self._publisher else None

    def digests(self) -> dict[str, int]:
        """Digests of the policy in the wire dtype, from the shards (a collective)."""
        name = self.config.rollout.dtype
        if all(entry.shape == entry.whole for lane in self._lanes for entry in lane.layout.entries):
            if self._own is None:
                return self.policy.shard_digests(name)
            return digests(self._own, DTYPES[name], self.policy.group) | self.policy.frozen_digests
        shards = self._shards()
        if self._digester is None or self._digester[0] is not shards:
            places, slices = slice_shards(shards, self._lanes)
            self._digester = (shards, places, slices, digester(slices, DTYPES[name]))
        _, places, slices, made = self._digester
        self._slices, wholes = slice_digests(places, slices, DTYPES[name], self.policy.group, made)
        return wholes | self.policy.frozen_digests

    def start(self, version: int, digests: dict[str, int], *, evaluate: bool) -> None:
        """Gather the policy (a collective) and hand it to the bus thread.

        Args:
            digests: of the last call of `digests`.

        Raises:
            NonFiniteWeights: a tensor is not finite; nothing of the version is applied.
        """
        self._is_out, self._evaluates = True, evaluate
        if not self.policy.meshes.in_first_replica:
            return  # those that hold rank 0's copy gather it
        if self._lanes:
            self._spread(version, digests, evaluate=evaluate)
            return
        dtype = DTYPES[self.config.rollout.dtype]
        tensors = gather_pieces(self.policy.layout, self._shards(), dtype, self._group)
        if self._publisher is None:
            for _ in tensors:
                pass  # in the collectives, but nothing is put together here
            return
        self._publisher.start_publish(version, tensors, digests, evaluate=evaluate)

    def _spread(self, version: int, digests: dict[str, int], *, evaluate: bool) -> None:
        """Pack on each rank what it sends."""
        pieces = self._spreader.pieces(self._shards(), DTYPES[self.config.rollout.dtype])
        into = torch.tensor([self._publisher.spare(version) if self._publisher is not None else 0])
        if dist.get_world_size(self._group) > 1:
            into = into.to(carrier(self._shards()[0].local, self._group))
            dist.broadcast(into, group=self._group, group_src=0)
        if self._publisher is not None:
            self._publisher.start_publish(version, pieces, digests, evaluate=evaluate, slices=self._slices)
        elif self._sender is not None:
            self._sender.pack(version, int(into), pieces)
        else:
            for _ in pieces:
                pass  # in the collectives, with nothing to send

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
        if self._sender is not None:  # rank 0 waits for the last broadcast and for evaluations
            self._sender.close(self.config.weight_bus.deadline_s + self.config.evaluation.deadline_s)


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
