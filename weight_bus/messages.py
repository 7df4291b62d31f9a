"""Control plane of the weight bus: what publisher and subscribers say beside the buckets.

| phase  | publisher                | subscriber                                                    |
|--------|--------------------------|---------------------------------------------------------------|
| join   | Welcome                  | Join                                                          |
| epoch  | Epoch                    | EpochReady                                                    |
| send   | NewLayout where it is new, Begin, then buckets | Staged (whole, verified; or corrupt) or ReceiveFailed |
| apply  | Commit or Abort          | Applied (what the engine holds), or Holding and later Applied |
| always | Heartbeat, Removed, Goodbye | Heartbeat, Goodbye                                         |

A message of another session or an older epoch is ignored, which fences off peers that were stopped and come back.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.channel import Message, WireError, registry
from weight_bus.manifest import ALIGNMENT, Layout, Manifest, plan

MAX_UPDATE_BYTES = 1 << 42


@dataclass(frozen=True, slots=True, kw_only=True)
class InSession(Message):
    """Of one membership, which lasts from a Join to its end."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfVersion(InSession):
    """Of one version on its way in one epoch."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(InSession):
    """A subscriber wants updates. `version` and `digest` are what its engine verifiably holds, if anything."""

    name: str
    instance: str  # random per subscriber object; distinguishes a restarted server from one that reconnects
    pid: int
    host: str
    version: int = -1
    digest: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # what its transport must have in common with the publisher's


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(InSession):
    """The publisher admits this session."""

    incarnation: int
    version: int  # last published version, -1 before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(InSession):
    """The sender lives. Subscribers send theirs from a thread of its own, so a broadcast cannot hold it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(InSession):
    """A new membership is being formed, of the subscribers that answer."""

    epoch: int
    members: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReady(InSession):
    """The subscriber is free to enter the group of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLayout(Message):
    """What versions carry whose Begin names this `id`; sent before the first of them, and the same to all members.

    Where a tensor lies in a bucket is not said: both sides derive it.
    """

    id: str  # `Layout.id`
    bucket_bytes: int
    names: list[str]  # of logical tensors
    dtypes: list[str]
    shapes: list[list[int]]
    boxes: list[list[int]] = field(default_factory=list)
    """Of each entry: number of its tensor, start, shape. Without any, each tensor is an entry."""
    kept: list[str] = field(default_factory=list)
    """Tensors that do not travel: the engine must hold them (weight_bus/adapters.py)."""
    lane: int = 0
    first_bytes: int = 0  # of the first bucket at most, see `Planner`


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """The buckets of `version` follow in the group of `epoch`, which is built first where it is new.

    It is the same to all members, so that it is encoded once.
    """

    epoch: int
    version: int
    incarnation: int
    evaluate: bool
    ranks: dict[str, int]  # of each session in the group; 0 is the publisher
    size: int
    endpoint: str  # where the transport meets, as the publisher's transport names it
    bucket_bytes: int
    layout: str  # id
    digests: NDArray[np.int64]  # of the layout's names, in order; their 64 bits
    digest: str  # of the whole version
    base: str = ""
    """Digest of the staged version that what follows is a change of; empty says that the version comes whole."""
    wire_bytes: int = 0  # of the change, as it comes
    change_bytes: int = 0  # of the change after decompression; no more than wire_bytes where it is not compressed
    change_digest: str = ""  # of the change as it comes, see `delta.changes.digest_of`
    lane: int = 0
    lanes: int = 1  # a version comes as so many of these, and `digest` is of all of them (lanes.py)
    here: int = 1  # of them lead to this position
    position: int = 0  # scheduler rank
    sender: int = 0  # learner rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(OfVersion):
    """Every bucket has arrived; `corrupt` names the tensors whose bytes are not the manifest's."""

    corrupt: list[str] = field(default_factory=list)
    wire_s: float = 0.0  # from the first bucket to the last, as this subscriber saw it
    verify_s: float = 0.0  # digests of what came


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveFailed(OfVersion):
    """The buckets did not all arrive. The engine has not been touched."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(OfVersion):
    """Apply what is staged."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(OfVersion):
    """Forget what is staged."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(OfVersion):
    """What the engine holds after a Commit. `differences` names wrong tensors; none means it serves `version`."""

    digest: str  # of what the engine holds; empty when it could not load
    differences: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(OfVersion):
    """The engine keeps an older version, for an evaluation, before it applies `version`: it does not
    count as slow, and is not waited for, for `limit_s` from now."""

    limit_s: float
    reason: str
    stages: bool = False  # it takes newer versions meanwhile, in the place of this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(InSession):
    """This session has ended. With `rejoin` the subscriber may join anew."""

    reason: str
    rejoin: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(InSession):
    """The sender leaves in good order."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlist(InSession):
    """A learner rank has lanes to send; the session is one that only learner ranks know."""

    rank: int
    endpoints: list[str]  # where the group of each of its lanes meets; then, where those beside it do
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(OfVersion):
    """The publisher has a learner rank send its lanes of a version, in groups that are built first where `fresh`."""

    size: int
    fresh: bool
    number: int = 0  # of the order, which may come more than once
    beside: bool = False  # to those beside the main group


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(OfVersion):
    """A learner rank has sent its lanes; or why not."""

    number: int = 0  # of the order
    reason: str = ""
    symptom: str = ""
    code: str = ""  # of its error, where that says more than the symptom
    endpoints: list[str] = field(default_factory=list)  # as in Enlist, of now


def described(layout: Layout, bucket_bytes: int, lane: int = 0, first_bytes: int = 0) -> NewLayout:
    """A layout as it travels."""
    tensors = {entry.name: entry for entry in layout.entries}
    numbers = {name: number for number, name in enumerate(tensors)}
    boxes = [[numbers[entry.name], *entry.start, *entry.shape] for entry in layout.entries]
    is_whole = all(entry.shape == entry.whole for entry in layout.entries)
    return NewLayout(
        id=layout.id,
        bucket_bytes=bucket_bytes,
        names=list(tensors),
        dtypes=[entry.dtype for entry in tensors.values()],
        shapes=[list(entry.whole) for entry in tensors.values()],
        boxes=[] if is_whole else boxes,
        kept=list(layout.kept),
        lane=lane,
        first_bytes=first_bytes,
    )


def layout_of(new: NewLayout, alignment: int = ALIGNMENT) -> Layout:
    """The inverse of `described`.

    Raises:
        WireError: lists of different lengths, a box that is not inside its tensor, an absurd total, an unknown dtype, a
            name given twice, or contents that are not those of `new.id`.
    """
    if not len(new.names) == len(new.dtypes) == len(new.shapes) or new.bucket_bytes < 1:
        raise WireError(f"layout: names, dtypes, shapes differ in length, or bucket_bytes {new.bucket_bytes}")
    tensors = list(zip(new.names, new.dtypes, map(tuple, new.shapes), strict=True))
    try:
        boxes = [_box(tensors, *box) for box in new.boxes]
        layout = plan(boxes or tensors, new.bucket_bytes, alignment, new.kept, max(0, new.first_bytes))
    except ValueError as error:
        raise WireError(f"layout: {error}") from error
    if layout.num_bytes > MAX_UPDATE_BYTES:
        raise WireError(f"layout: {layout.num_bytes} bytes is above {MAX_UPDATE_BYTES}")
    if layout.id != new.id:
        raise WireError(f"layout: id {new.id[:40]!r} is not that of its tensors, {layout.id}")
    return layout


def _box(tensors: list[tuple[str, str, tuple[int, ...]]], number: int = -1, *place: int) -> tuple[Any, ...]:
    """Of tensor `number`, as `plan` takes it. Raises ValueError."""
    if not 0 <= number < len(tensors) or len(place) != 2 * len(tensors[number][2]):
        raise ValueError(f"a box {[number, *place][:9]} of {len(tensors)} tensors")
    name, dtype, whole = tensors[number]
    return name, dtype, place[len(whole) :], place[: len(whole)], whole


def digest_array(manifest: Manifest) -> NDArray[np.int64]:
    """The digests as Begin carries them."""
    return np.array([manifest.digests[name] for name in manifest.layout.names], np.uint64).view(np.int64)


def manifest_of(begin: Begin, layout: Layout) -> Manifest:
    """The manifest that a Begin describes, where `layout` came last.

    Raises WireError: another layout, an impossible rank or change, or digests that are not those of `begin.digest`.
    """
    if begin.layout != layout.id:
        raise WireError(f"Begin of v{begin.version}: layout {begin.layout[:40]!r} has not come")
    if len(begin.digests) != len(layout.names):
        raise WireError(f"Begin of v{begin.version}: {len(begin.digests)} digests of {len(layout.names)} tensors")
    if begin.bucket_bytes < 1 or not all(0 < rank < begin.size for rank in begin.ranks.values()):
        ranks = f"rank {min(begin.ranks.values())}/{begin.size}"
        raise WireError(f"Begin of v{begin.version}: bucket_bytes {begin.bucket_bytes}, {ranks}")
    manifest = Manifest(layout, dict(zip(layout.names, begin.digests.view(np.uint64).tolist(), strict=True)))
    if begin.base and not 0 < begin.wire_bytes <= begin.change_bytes <= layout.num_bytes:
        sizes = f"{begin.wire_bytes} and {begin.change_bytes} bytes, of {layout.num_bytes}"
        raise WireError(f"Begin of v{begin.version}: a change of {sizes}")
    if begin.lanes == 1 and manifest.digest != begin.digest:
        raise WireError(f"Begin of v{begin.version}: digest {begin.digest} is not that of its tensors")
    return manifest


TO_PUBLISHER = registry(Join, Heartbeat, EpochReady, Staged, ReceiveFailed, Applied, Holding, Goodbye, Enlist, Sent)
TO_SUBSCRIBER = registry(Welcome, Heartbeat, Epoch, NewLayout, Begin, Commit, Abort, Removed, Goodbye)
TO_SENDER = registry(Send, Goodbye)
