"""A subscriber's data plane: from a Begin to verified bytes beside the engine, or straight into the engine.

`Intake` stages a version on the transport's device and proves its bytes; the engine is touched afterwards, by a load.
`DirectIntake` stops the engine and lets its own processes receive. Nothing is proven before the last bucket is live.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from configs.infrastructure import WeightBus
from replay.channel import WireError
from weight_bus.delta.changes import ChangeReader
from weight_bus.manifest import ALIGNMENT, WITHOUT_GAPS, Manifest
from weight_bus.messages import Abort, Begin, Commit, Go, manifest_of
from weight_bus.staging import Staging
from weight_bus.transports.base import DirectReceiver, Formation, Labelled, Transport, group_prefix, ignore
from weight_bus.transports.direct import direct_facts

Load = Callable[[int, Iterable[tuple[str, torch.Tensor]]], Mapping[str, int]]
"""(version, named tensors) -> digests of what the engine holds afterwards. The tensors are views; copy them."""


class Received:
    """The version that has arrived and waits for a decision."""

    def __init__(self) -> None:
        self.staged: Begin | None = None
        self.seconds: dict[str, float] = {}
        """Of the last version: `wire`, from the first bucket to the last, and `verify`, what digests took beyond it."""

    def decide(self, decision: Commit | Abort) -> Begin | None:
        """What a decision is about, which is staged no longer; None when it is about something else."""
        staged = self.staged
        if staged is None or (staged.epoch, staged.version) != (decision.epoch, decision.version):
            return None
        self.staged = None
        return staged


class Intake(Received):
    """Stages one version at a time, in the group of one epoch."""

    ranks = 1

    def __init__(
        self, transport: Transport, run_id: str, alignment: int = ALIGNMENT, staging: Staging | None = None
    ) -> None:
        super().__init__()
        self._transport, self._run_id, self._alignment = transport, run_id, alignment
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

    def take(self, begin: Begin) -> list[str]:
        """Receive every bucket; builds the group where the epoch is new. Blocks for broadcasts only.

        Returns the names of tensors whose bytes are not the manifest's; none means that the version is staged.

        Raises TransportError: a peer was lost. The group is gone; WireError: the manifest is not consistent.
        """
        self.staged = None
        manifest = manifest_of(begin, self._alignment)
        if not begin.base:
            self._holds = ""
            self.staging.prepare(manifest, self._transport.device)
        pieces = self._reader.room(begin.wire_bytes, begin.bucket_bytes) if begin.base else self.staging.buckets
        if self._formed != begin.epoch:
            self._transport.form(_formation(begin, self._run_id))
            self._formed = begin.epoch
        if isinstance(self._transport, Labelled):
            self._transport.label(begin.version, None if begin.base else manifest.by_bucket())
        started = time.monotonic()
        for index, bucket in enumerate(pieces):
            self._transport.broadcast(bucket, index)
        self._transport.finish(ignore if begin.base else self.staging.digest)
        arrived = time.monotonic()
        corrupt = self._change(begin, manifest) if begin.base else self.staging.corrupt()
        self.seconds = {"wire": arrived - started, "verify": time.monotonic() - arrived}
        if not corrupt:
            self.staged, self._holds = begin, begin.digest
        return corrupt

    def _change(self, begin: Begin, manifest: Manifest) -> list[str]:
        """Make the new version of what is staged, as `take`. Not before all has come: the others wait for this one."""
        held, self._holds = self._holds, ""
        if held != begin.base or replace(manifest, digests=self.staging.manifest.digests) != self.staging.manifest:
            raise WireError(f"v{begin.version} comes as a change of {begin.base}, and {held or 'nothing'} is staged")
        if not self._reader.arrived(begin.wire_bytes, begin.change_digest):
            return [f"the change from {begin.base}"]
        self._reader.apply(self.staging.buckets, begin.wire_bytes, begin.change_bytes)
        self.staging.manifest = manifest
        return []

    def apply(self, version: int, load: Load) -> Mapping[str, int]:
        """Load what is staged; digests of what the engine holds then."""
        return load(version, self.staging.tensors())

    def forget(self, *, resume: bool = True) -> None:
        """Drop the group and what is staged; the buffers stay."""
        self.staged, self._formed = None, 0
        self._transport.leave()

    def close(self) -> None:
        """Drop everything."""
        self._transport.close()


class DirectIntake(Received):
    """Lets the engine's processes receive one version at a time. What goes wrong after `take` has begun spoils it."""

    def __init__(self, receiver: DirectReceiver, config: WeightBus, run_id: str) -> None:
        super().__init__()
        self._receiver, self._run_id = receiver, run_id
        self._formed = 0
        self._pausing: Begin | None = None  # what waits for Go
        self._still = False  # the engine stands still, untouched
        self.ranks = receiver.ranks
        self.facts = direct_facts(config)
        self.manifest = Manifest((), ())

    def prepare(self, begin: Begin) -> None:
        """Stop the engine for a version.

        Raises:
            WireError: the manifest or the ranks are not consistent.
            TransportError: the engine did not pause; it goes on.
        """
        self.staged = self._pausing = None
        self.manifest = manifest_of(begin, WITHOUT_GAPS)
        if begin.rank + self.ranks > begin.size:
            raise WireError(f"Begin of v{begin.version}: {self.ranks} ranks from {begin.rank} on, of {begin.size}")
        self._receiver.pause(begin.version)
        self._pausing, self._still = begin, True

    def due(self, go: Go) -> Begin | None:
        """What a Go is about; None when the engine does not stand still for it."""
        begin = self._pausing
        return begin if begin is not None and (begin.epoch, begin.version) == (go.epoch, go.version) else None

    def take(self, begin: Begin) -> list[str]:
        """Receive every bucket into the engine; unproven bytes are never named. Raises EngineSpoiled: not all came."""
        self._pausing, self._still = None, False
        if self._formed != begin.epoch:
            self._receiver.form(_formation(begin, self._run_id))
            self._formed = begin.epoch
        started = time.monotonic()
        for index, bucket in enumerate(self.manifest.by_bucket()):
            self._receiver.receive(bucket, index)
        self.seconds = {"wire": time.monotonic() - started, "verify": 0.0}
        self.staged = begin
        return []

    def apply(self, version: int, _: Load) -> Mapping[str, int]:
        """Digests of what the engine holds; it was loaded bucket by bucket."""
        return self._receiver.prove(version, self.manifest.entries)

    def decide(self, decision: Commit | Abort) -> Begin | None:
        """See `Received.decide`. An update that is called off before Go lets the engine go on."""
        begin = self._pausing
        if isinstance(decision, Abort) and begin is not None and begin.epoch == decision.epoch:
            self._call_off()
        return super().decide(decision)

    def forget(self, *, resume: bool = True) -> None:
        """Leave the group. An engine that stands still, untouched, goes on, unless it is to be paused anew at once."""
        self.staged = self._pausing = None
        if resume:
            self._call_off()
        if self._formed:
            self._formed = 0
            self._receiver.leave()

    def close(self) -> None:
        """Nothing: the engine's group ends with the engine, or with the next publisher's first epoch."""

    def _call_off(self) -> None:
        self._pausing = None
        if self._still:
            self._still = False
            self._receiver.resume()


def _formation(begin: Begin, run_id: str) -> Formation:
    prefix = group_prefix(run_id, begin.incarnation, begin.epoch)
    return Formation(epoch=begin.epoch, rank=begin.rank, size=begin.size, endpoint=begin.endpoint, prefix=prefix)
