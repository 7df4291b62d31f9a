"""A subscriber's data plane: from a Begin to verified bytes beside the engine.

`Intake` stages a version on the transport's device and proves its bytes; the engine is touched afterwards, by a load.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from replay.channel import WireError
from weight_bus.delta.changes import ChangeReader
from weight_bus.manifest import ALIGNMENT, NOTHING, Manifest
from weight_bus.messages import Begin, NewLayout, layout_of, manifest_of
from weight_bus.staging import Staging
from weight_bus.transports.base import Formation, Transport, group_prefix, ignore

Load = Callable[[int, Iterable[tuple[str, torch.Tensor]]], Mapping[str, int]]
"""(version, named tensors) -> digests of what the engine holds afterwards. The tensors are views; copy them."""


class Intake:
    """Stages one version at a time, in the group of one epoch."""

    def __init__(
        self, transport: Transport, run_id: str, alignment: int = ALIGNMENT, staging: Staging | None = None
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Of the last version: `wire`, from the first bucket to the last, and `verify`, what digests took beyond it."""
        self._transport, self._run_id, self._alignment = transport, run_id, alignment
        self._layout = NOTHING.layout
        self._formed = 0  # epoch of the present group, 0 for none
        self.staging = staging or Staging()
        self._reader = ChangeReader(transport.device)
        self._holds = ""  # digest of the version whose bytes are staged, proven; empty when they may be anything

    @property
    def facts(self) -> dict[str, str]:
        """What the transport must have in common with the publisher's."""
        return self._transport.facts()

    @property
    def manifest(self) -> Manifest:
        """Of the last version."""
        return self.staging.manifest

    def learn(self, new: NewLayout) -> None:
        """What versions carry from now on. Raises WireError: it is not consistent."""
        self._layout = layout_of(new, self._alignment)

    def take(self, begin: Begin) -> list[str]:
        """Receive every bucket, as the only one of `begin.ranks`, in a group that is built where the epoch is new.

        Blocks for broadcasts only.

        Returns the names of tensors whose bytes are not the manifest's; none means that the version is staged.

        Raises TransportError: a peer was lost. The group is gone; WireError: the manifest is not consistent.
        """
        manifest = manifest_of(begin, self._layout)
        if not begin.base:
            self._holds = ""
            self.staging.prepare(manifest, self._transport.device)
        pieces = self._reader.room(begin.wire_bytes, begin.bucket_bytes) if begin.base else self.staging.buckets
        if self._formed != begin.epoch:
            self._transport.form(_formation(begin, self._run_id))
            self._formed = begin.epoch
        self._transport.label(begin.version, None if begin.base else manifest.layout)
        started = time.monotonic()
        for index, bucket in enumerate(pieces):
            self._transport.broadcast(bucket, index)
        self._transport.finish(ignore if begin.base else self.staging.digest)
        arrived = time.monotonic()
        corrupt = self._change(begin, manifest) if begin.base else self.staging.corrupt()
        self.seconds = {"wire": arrived - started, "verify": time.monotonic() - arrived}
        if not corrupt:
            self._holds = begin.digest
        return corrupt

    def _change(self, begin: Begin, manifest: Manifest) -> list[str]:
        """Make the new version of what is staged, as `take`. Not before all has come: the others wait for this one."""
        held, self._holds = self._holds, ""
        if held != begin.base or manifest.layout.id != self.staging.manifest.layout.id:
            raise WireError(f"v{begin.version} comes as a change of {begin.base}, and {held or 'nothing'} is staged")
        if not self._reader.arrived(begin.wire_bytes, begin.change_digest):
            return [f"the change from {begin.base}"]
        self._reader.apply(self.staging.buckets, begin.wire_bytes, begin.change_bytes)
        self.staging.manifest = manifest
        return []

    def apply(self, version: int, load: Load) -> Mapping[str, int]:
        """Load what is staged; digests of what the engine holds then."""
        return load(version, self.staging.tensors())

    def forget(self) -> None:
        """Drop the group and what is staged; the buffers stay."""
        self._formed = 0
        self._transport.leave()

    def close(self) -> None:
        """Drop everything."""
        self._transport.close()


def _formation(begin: Begin, run_id: str) -> Formation:
    prefix = group_prefix(run_id, begin.incarnation, begin.epoch)
    (rank,) = begin.ranks.values()
    return Formation(epoch=begin.epoch, rank=rank, size=begin.size, endpoint=begin.endpoint, prefix=prefix)
