"""Who is there: joining, staying, leaving, and a look at the run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from replay.channel.frames import Message

Role = Literal["rollout_server", "learner", "launcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of every peer, and again after each reconnect."""

    role: Role
    name: str
    pid: int
    host: str
    rank: int = 0
    world_size: int = 1
    fingerprint: dict[str, str] = field(default_factory=dict)
    """What both ends must agree on (tokenizer, vocabulary, group size, ...), by name."""
    digest: str = ""
    """Learner: parameter digest of those weights."""
    bus_address: str | None = None
    """Learner rank 0: control address of the weight bus."""
    version: int = 0
    """Learner: version of the weights that it holds at start."""
    incarnation: int = 0
    """Learner: the incarnation that it has, when it comes back to a replay that was restarted; 0 at its own start."""
    cursor: dict[str, Any] | None = None
    """Learner rank 0 after `--resume`: replay's state from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Replay's answer to Hello."""

    incarnation: int
    version: int
    """Last committed version; to a learner rank: of its own line, so the version that it holds itself."""
    bus_address: str | None
    resumes_until: int = 0
    """To learner ranks: steps up to this one are in the journal already and are taken again as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """Replay does not admit this peer, or ends the run; the reason says why and what to do."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Sent by peers every `network.heartbeat_s` and answered by replay with one of its own."""

    activity: str = ""
    """What the sender is doing, in words, such as `waiting for leases`."""
    since_s: float = 0.0
    """For how long."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Numbers for the live view (tokens per second, running trajectories, idle seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """The sender leaves in good order; from replay: the run is over."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(Message):
    """Ask for Status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """Replay's view of the run, for the live view and for tests."""

    state: dict[str, Any]
