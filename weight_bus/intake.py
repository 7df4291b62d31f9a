"""A subscriber's data plane: from a Begin to verified bytes beside the engine.

`Intake` stages a version on the transport's device and proves its bytes; the engine is touched afterwards, by a load.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from replay.channel import WireError
from weight_bus.delta.changes import ChangeReader
from weight_bus.errors import TransportError
from weight_bus.lanes import joined, whole_digests
from weight_bus.manifest import ALIGNMENT, Manifest
from weight_bus.messages import Begin, manifest_of
from weight_bus.staging import Staging
from weight_bus.transports.base import Formation, Transport, group_prefix, ignore, of_lane

Load = Callable[[int, Iterable[tuple[str, torch.Tensor]]], Mapping[str, int]]
"""(version, named tensors) -> digests of what the engine holds afterwards. The tensors are views; copy them."""


class Intake:
    """Stages one version at a time, in the groups of one epoch: one for each lane that leads here.

    Args:
        make: another transport, for each lane after the first.
    """

    def __init__(
        self,
        transport: Transport,
        run_id: str,
        alignment: int = ALIGNMENT,
        staging: Staging | None = None,
        make: Callable[[], Transport] | None = None,
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Of the last version: `wire`, from the first bucket to the last, and `verify`, what digests took beyond it."""
        self._transport, self._run_id, self._alignment = transport, run_id, alignment
        self._transports, self._make = [transport], make
        self._formed = 0  # epoch of the present group, 0 for none
        self.staging = staging or Staging()
        self._reader = ChangeReader(transport.device)
        self.manifest = Manifest((), ())
        """All tensors of the last version, with what the engine's digests must be."""
        self._holds = ""  # digest of the version whose bytes are staged, proven; empty when they may be anything

    @property
    def facts(self) -> dict[str, str]:
        """What the transport must have in common with the publisher's."""
        return self._transport.facts()

    def take(self, *begins: Begin) -> list[str]:
        """Receive every bucket; builds the groups where the epoch is new. Blocks for broadcasts only.

        Args:
            begins: of each lane that leads here.

        Returns the names of tensors whose bytes are not the manifest's; none means that the version is staged.

        Raises TransportError: a peer was lost. The group is gone; WireError: the manifest is not consistent.
        """
        begin, (lanes, self.manifest) = begins[0], read_lanes(begins, self._alignment)
        manifest, sources = joined(lanes).manifest, joined(lanes).sources
        while len(self._transports) < len(begins) and self._make is not None:
            self._transports.append(self._make())
        if not begin.base:
            self._holds = ""
            self.staging.prepare(manifest, self._transport.device)
        pieces = self._reader.room(begin.wire_bytes, begin.bucket_bytes) if begin.base else self.staging.buckets
        fresh = self._formed != begin.epoch
        for one, transport, layout in zip(begins, self._transports, lanes, strict=False):
            with _naming(one):
                if fresh:
                    transport.form(_formation(one, self._run_id))
                transport.label(begin.version, None if begin.base else layout)
        self._formed = begin.epoch
        started = time.monotonic()
        for number, bucket in enumerate(pieces):
            lane, index = (0, number) if begin.base else sources[number]
            with _naming(begins[lane]):
                self._transports[lane].broadcast(bucket, index)
        for lane, (one, transport) in enumerate(zip(begins, self._transports, strict=False)):
            numbers = [number for number, source in enumerate(sources) if source[0] == lane]
            with _naming(one):
                transport.finish(ignore if begin.base else partial(self._arrived, numbers))
        arrived = time.monotonic()
        corrupt = self._change(begin, manifest) if begin.base else self.staging.corrupt()
        self.seconds = {"wire": arrived - started, "verify": time.monotonic() - arrived}
        if not corrupt:
            self._holds = begin.digest
        return corrupt

    def _arrived(self, numbers: Sequence[int], index: int) -> None:
        self.staging.digest(numbers[index])

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

    def forget(self) -> None:
        """Drop the group and what is staged; the buffers stay."""
        self._formed = 0
        for transport in self._transports:
            transport.leave()

    def close(self) -> None:
        """Drop everything."""
        for transport in self._transports:
            transport.close()


def read_lanes(begins: Sequence[Begin], alignment: int) -> tuple[list[Manifest], Manifest]:
    """Manifests of lanes; and all of them with the digests of whole tensors, where these are all lanes of a version.

    Raises WireError: a manifest is not consistent, a tensor comes twice to a scheduler rank, or the tensors are not
    those of the version's digest.
    """
    first, lanes = begins[0], [manifest_of(begin, alignment) for begin in begins]
    if first.lanes == 1:
        return lanes, lanes[0]
    entries = [entry for lane in lanes for entry in lane.entries]
    named = [(begin.position, entry.name) for begin, lane in zip(begins, lanes, strict=True) for entry in lane.entries]
    if len(set(named)) < len(named):
        raise WireError(f"Begin of v{first.version}: lanes to the same scheduler rank carry the same tensor")
    if len(begins) < first.lanes:
        return lanes, Manifest((), ())
    try:
        whole = Manifest(tuple(entries), (), whole_digests(lanes))
    except ValueError as error:
        raise WireError(f"Begin of v{first.version}: {error}") from error
    if whole.digest != first.digest:
        raise WireError(f"Begin of v{first.version}: digest {first.digest} is not that of the tensors of its lanes")
    return lanes, whole


def _formation(begin: Begin, run_id: str) -> Formation:
    prefix = group_prefix(run_id, begin.incarnation, begin.epoch)
    lane0 = Formation(epoch=begin.epoch, rank=begin.rank, size=begin.size, endpoint=begin.endpoint, prefix=prefix)
    return of_lane(lane0, begin.lane)


@contextmanager
def _naming(begin: Begin) -> Iterator[None]:
    """A lane that breaks is named, where there are several."""
    try:
        yield
    except TransportError as error:
        if begin.lanes == 1:
            raise
        raise error.during(f"lane {begin.lane}, from learner rank {begin.sender}") from error
