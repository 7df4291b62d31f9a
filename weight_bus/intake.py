"""A subscriber's data plane: from a Begin to verified bytes on the transport's device, before the engine is touched."""

import time

from weight_bus.messages import Abort, Begin, Commit, manifest_of
from weight_bus.staging import Staging
from weight_bus.transports.base import Formation, Transport, group_prefix


class Intake:
    """Stages one version at a time, in the group of one epoch."""

    def __init__(self, transport: Transport, run_id: str) -> None:
        self._transport = transport
        self._run_id = run_id
        self._formed = 0
        """Epoch of the present group, 0 for none."""
        self.staging = Staging(transport.device)
        self.seconds: dict[str, float] = {}
        """Of the last version: `wire`, from the first bucket to the last, and `verify`, the digests of what came."""
        self.staged: Begin | None = None
        """What is staged and verified."""

    @property
    def facts(self) -> dict[str, str]:
        """What the transport must have in common with the publisher's."""
        return self._transport.facts()

    def take(self, begin: Begin) -> list[str]:
        """Receive every bucket; builds the group where the epoch is new. Blocks for broadcasts only.

        Returns:
            Names of tensors whose bytes are not the manifest's; none means that the version is staged.

        Raises:
            TransportError: a peer was lost. The group is gone.
            WireError: the manifest is not consistent.
        """
        self.staged = None
        self.staging.prepare(manifest_of(begin))
        if self._formed != begin.epoch:
            prefix = group_prefix(self._run_id, begin.incarnation, begin.epoch)
            self._transport.form(
                Formation(epoch=begin.epoch, rank=begin.rank, size=begin.size, endpoint=begin.endpoint, prefix=prefix)
            )
            self._formed = begin.epoch
        started = time.monotonic()
        for index, bucket in enumerate(self.staging.buckets):
            self._transport.broadcast(bucket, index)
        self._transport.finish()
        arrived = time.monotonic()
        corrupt = self.staging.corrupt()
        self.seconds = {"wire": arrived - started, "verify": time.monotonic() - arrived}
        if not corrupt:
            self.staged = begin
        return corrupt

    def decide(self, decision: Commit | Abort) -> Begin | None:
        """What a decision is about, which is staged no longer; None when it is about something else."""
        staged = self.staged
        if staged is None or (staged.epoch, staged.version) != (decision.epoch, decision.version):
            return None
        self.staged = None
        return staged

    def forget(self) -> None:
        """Drop the group and what is staged; the buffers stay."""
        self.staged = None
        self._formed = 0
        self._transport.leave()

    def close(self) -> None:
        """Drop everything."""
        self._transport.close()
