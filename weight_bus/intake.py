"""A subscriber's data plane: from a Begin to verified bytes beside the engine.

`Intake` stages a version on the transport's device and proves its bytes; the engine is touched afterwards, by a load.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from replay.channel import WireError
from weight_bus.delta.changes import ChangeReader
from weight_bus.errors import TransportError
from weight_bus.lanes import Joined, joined, whole_digests
from weight_bus.manifest import ALIGNMENT, NOTHING, Layout, Manifest
from weight_bus.messages import Begin, NewLayout, layout_of, manifest_of
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
        self.layouts = Layouts()
        self.manifest = NOTHING
        """All tensors of the last version, with what digests of the engine must be."""
        self._formed = 0  # epoch of the present group, 0 for none
        self.staging = staging or Staging()
        self._reader = ChangeReader(transport.device)
        self._holds = ""  # digest of the version whose bytes are staged, proven; empty when they may be anything

    @property
    def facts(self) -> dict[str, str]:
        """What the transport must have in common with the publisher's."""
        return self._transport.facts()

    def learn(self, new: NewLayout) -> None:
        """What versions carry from now on. Raises WireError: it is not consistent."""
        self.layouts.learn(new, self._alignment)

    def take(self, *begins: Begin) -> list[str]:
        """Receive every bucket, as the only one of `begin.ranks`, in groups that are built where the epoch is new.

        Blocks for broadcasts only. `begins` are of the lanes that lead here.

        Returns the names of tensors whose bytes are not the manifest's; none means that the version is staged.

        Raises TransportError: a peer was lost. The group is gone; WireError: the manifest is not consistent.
        """
        begin, (lanes, self.manifest) = begins[0], self.layouts.read(begins)
        together = self.layouts.joined(begin.position, [lane.layout for lane in lanes])
        digests = {name: digest for lane in lanes for name, digest in lane.digests.items()}
        manifest, sources = together.layout.with_digests(digests), together.sources
        while len(self._transports) < len(begins) and self._make is not None:
            self._transports.append(self._make())
        if not begin.base:
            self._holds = ""
            self.staging.prepare(manifest, self._transport.device)
        pieces = self._reader.room(begin.wire_bytes, begin.bucket_bytes) if begin.base else self.staging.buckets
        fresh, ends = self._formed != begin.epoch, list(zip(begins, self._transports, strict=False))
        for (one, transport), lane in zip(ends, lanes, strict=True):
            with _naming(one):
                if fresh:
                    transport.form(_formation(one, self._run_id))
                transport.label(begin.version, None if begin.base else lane.layout)
        self._formed = begin.epoch
        started = time.monotonic()
        for number, bucket in enumerate(pieces):
            n, index = (0, number) if begin.base else sources[number]
            with _naming(begins[n]):
                self._transports[n].broadcast(bucket, index)
        for n, (one, transport) in enumerate(ends):
            numbers = [number for number, source in enumerate(sources) if source[0] == n]
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
        for transport in self._transports:
            transport.leave()

    def close(self) -> None:
        """Drop everything."""
        for transport in self._transports:
            transport.close()


class Layouts:
    """What each lane of a publisher carries, as it was said last."""

    def __init__(self) -> None:
        self._known: dict[int, Layout] = {}
        self._joined: dict[int, tuple[list[Layout], Joined]] = {}

    def learn(self, new: NewLayout, alignment: int) -> None:
        """Of a lane. Raises WireError: it is not consistent."""
        self._known[new.lane] = layout_of(new, alignment)

    def joined(self, position: int, lanes: list[Layout]) -> Joined:
        """Those that lead to a position, the same as the last time while they are."""
        known = self._joined.get(position)
        if known is None or known[0] != lanes:
            known = self._joined[position] = (lanes, joined(lanes))
        return known[1]

    def read(self, begins: Sequence[Begin]) -> tuple[list[Manifest], Manifest]:
        """Manifest of each lane; and one of whole tensors where these are all lanes of a version.

        Raises WireError: a manifest is not consistent, a tensor comes twice to a scheduler rank, or the tensors are
        not those of the version's digest.
        """
        first, lanes = begins[0], [manifest_of(one, self._known.get(one.lane, NOTHING.layout)) for one in begins]
        if first.lanes == 1:
            return lanes, lanes[0]
        names = [(one.position, name) for one, lane in zip(begins, lanes, strict=True) for name in lane.layout.names]
        if len(set(names)) < len(names):
            raise WireError(f"Begin of v{first.version}: lanes to the same scheduler rank carry the same tensor")
        if len(begins) < first.lanes:
            return lanes, NOTHING
        try:
            digests = whole_digests(lanes)
        except ValueError as error:
            raise WireError(f"Begin of v{first.version}: {error}") from error
        entries = tuple(entry for lane in lanes for entry in lane.layout.entries)
        whole = Layout(entries, (), tuple(name for lane in lanes for name in lane.layout.kept)).with_digests(digests)
        if whole.digest != first.digest:
            raise WireError(f"Begin of v{first.version}: digest {first.digest} is not that of what its lanes carry")
        return lanes, whole


def _formation(begin: Begin, run_id: str) -> Formation:
    prefix = group_prefix(run_id, begin.incarnation, begin.epoch)
    (rank,) = begin.ranks.values()
    first = Formation(epoch=begin.epoch, rank=rank, size=begin.size, endpoint=begin.endpoint, prefix=prefix)
    return of_lane(first, begin.lane)


@contextmanager
def _naming(begin: Begin) -> Iterator[None]:
    """A lane that breaks is named, where there are several."""
    try:
        yield
    except TransportError as error:
        if begin.lanes == 1:
            raise
        raise error.during(f"lane {begin.lane}, from learner rank {begin.sender}") from error
