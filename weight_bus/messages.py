"""Control plane of the weight bus: what publisher and subscribers say beside the buckets.

| phase  | publisher                | subscriber                                                  |
|--------|--------------------------|-------------------------------------------------------------|
| join   | Welcome                  | Join                                                        |
| epoch  | Epoch                    | EpochReady                                                  |
| send   | Begin, then the buckets  | Staged (whole and verified, or corrupt) or ReceiveFailed    |
| apply  | Commit or Abort          | Applied (what the engine holds), or Holding and later Applied |
| always | Heartbeat, Removed, Goodbye | Heartbeat, Goodbye                                       |

A message of another session or an older epoch is ignored, which fences off peers that were stopped and come back.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from replay.channel import Message, WireError, registry
from weight_bus.manifest import ALIGNMENT, Manifest, plan

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
class Begin(OfVersion):
    """The buckets of `version` follow in the group of `epoch`, which is built first where it is new.

    The layout is not sent: both sides derive it from names, dtypes, shapes and `bucket_bytes`.
    """

    incarnation: int
    evaluate: bool
    rank: int
    size: int
    endpoint: str  # where the transport meets, as the publisher's transport names it
    bucket_bytes: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    digests: list[int]
    digest: str  # of the whole version
    kept: dict[str, int] = field(default_factory=dict)
    """Digests of tensors that do not travel: the engine must hold them (weight_bus/adapters.py)."""
    base: str = ""
    """Digest of the staged version that what follows is a change of; empty says that the version comes whole."""
    wire_bytes: int = 0  # of the change, as it comes
    change_bytes: int = 0  # of the change after decompression; no more than wire_bytes where it is not compressed
    change_digest: str = ""  # of the change as it comes, see `delta.changes.digest_of`
    lane: int = 0
    lanes: int = 1  # a version comes as so many of these, and `digest` is of all of them (lanes.py)
    position: int = 0  # of the scheduler rank that the lane leads to
    sender: int = 0  # learner rank
    here: int = 1  # lanes that lead to this position
    starts: list[list[int]] = field(default_factory=list)  # of slices; empty where all are whole tensors
    wholes: list[list[int]] = field(default_factory=list)


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
    endpoints: list[str]  # where the group of each of its lanes meets
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(OfVersion):
    """The publisher has a learner rank send its lanes of a version, in groups that are built first where `fresh`."""

    size: int
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(OfVersion):
    """A learner rank has sent its lanes; or why not."""

    reason: str = ""
    symptom: str = ""
    not_packed: bool = False  # it is late itself: no receiver's fault


def described(manifest: Manifest) -> dict[str, Any]:
    """The fields of Begin that say what a version is."""
    entries = manifest.entries
    cut = any(entry.whole for entry in entries)
    return {
        "starts": [list(entry.start) for entry in entries] if cut else [],
        "wholes": [list(entry.whole) for entry in entries] if cut else [],
        "names": [entry.name for entry in entries],
        "dtypes": [entry.dtype for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
        "digests": [manifest.digests[entry.name] for entry in entries],
        "digest": manifest.digest,
        "kept": manifest.kept,
    }


def manifest_of(begin: Begin, alignment: int = ALIGNMENT) -> Manifest:
    """The manifest that a Begin describes.

    Raises:
        WireError: lists of different lengths, a negative size, an absurd total, an unknown dtype, a name given
            twice, or digests that are not those of `begin.digest`.
    """
    if not len(begin.names) == len(begin.dtypes) == len(begin.shapes) == len(begin.digests):
        raise WireError(f"Begin of v{begin.version}: names, dtypes, shapes and digests differ in length")
    if begin.bucket_bytes < 1 or not 0 < begin.rank < begin.size:
        raise WireError(f"Begin of v{begin.version}: bucket_bytes {begin.bucket_bytes}, rank {begin.rank}/{begin.size}")
    tensors = tuple(zip(begin.names, begin.dtypes, map(tuple, begin.shapes), strict=True))
    digests = dict(zip(begin.names, begin.digests, strict=True))
    try:
        layout = _layout(tensors, begin.bucket_bytes, alignment)
        if begin.starts or begin.wholes:
            layout = _cut(layout, begin)
        manifest = layout.with_digests({**digests, **begin.kept}, begin.kept)
    except ValueError as error:
        raise WireError(f"Begin of v{begin.version}: {error}") from error
    if manifest.num_bytes > MAX_UPDATE_BYTES:
        raise WireError(f"Begin of v{begin.version}: {manifest.num_bytes} bytes is above {MAX_UPDATE_BYTES}")
    if begin.base and not 0 < begin.wire_bytes <= begin.change_bytes <= manifest.num_bytes:
        sizes = f"{begin.wire_bytes} and {begin.change_bytes} bytes, of {manifest.num_bytes}"
        raise WireError(f"Begin of v{begin.version}: a change of {sizes}")
    if begin.lanes == 1 and manifest.digest != begin.digest:
        raise WireError(f"Begin of v{begin.version}: digest {begin.digest} is not that of its tensors")
    return manifest


@lru_cache(maxsize=2)
def _layout(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], bucket_bytes: int, alignment: int) -> Manifest:
    """Remembered, because it stays the same: an update waits for it."""
    return plan(tensors, bucket_bytes, alignment)


def _cut(layout: Manifest, begin: Begin) -> Manifest:
    """With where slices begin. Raises ValueError: they are not inside their tensors."""
    entries = []
    for entry, start, whole in zip(layout.entries, begin.starts, begin.wholes, strict=True):
        if whole:
            inside = len(start) == len(whole) == len(entry.shape)
            if not inside or any(s < 0 or s + n > w for s, n, w in zip(start, entry.shape, whole, strict=True)):
                raise ValueError(f"{entry.name[:80]!r}: {[*entry.shape]} at {start} is not inside {whole}")
            entry = replace(entry, start=tuple(start), whole=tuple(whole))
        entries.append(entry)
    return replace(layout, entries=tuple(entries))


TO_PUBLISHER = registry(Join, Heartbeat, EpochReady, Staged, ReceiveFailed, Applied, Holding, Goodbye, Enlist, Sent)
TO_SENDER = registry(Send, Heartbeat, Goodbye)
TO_SUBSCRIBER = registry(Welcome, Heartbeat, Epoch, Begin, Commit, Abort, Removed, Goodbye)
