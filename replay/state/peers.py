"""Who is connected to replay: names, roles, when they were last heard, and what is to be sent. No socket, no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.schema import Config
from configs.shared import concerns
from replay.channel import Inventory, Message
from replay.channel.keys import SHARED
from replay.messages import FROM_RANK_0, FROM_SERVERS, Hello, Role
from replay.state.line import PolicyVersion


@dataclass(slots=True)
class Peer:
    """One connected process. `identity` is its socket's, `name` is for people."""

    identity: str
    hello: Hello
    last_heard: float
    last_acted: float
    """When a message came that is no heartbeat."""
    version: int = 0
    incarnation: int = 0
    """Of the learner that made `version`."""
    capacity: int = 0
    sampled: int = 0
    """Tokens that its engine has sampled, as its last Renew says."""
    moved_at: float = 0.0
    """When that number was another one."""
    activity: str = ""
    blocked: str = ""
    """As its last Heartbeat says."""
    since: float = 0.0
    unreachable_since: float | None = None
    """Learner ranks are not forgotten when a send fails: they may come back within network.silent_after_s."""
    gauges: dict[str, float] = field(default_factory=dict)
    groups_accepted: int = 0
    inventory: Inventory[tuple[int | str | bool, ...]] = field(default_factory=Inventory)
    """Leases (pass, index, attempt) and parts of evaluations (version, set, greedy, first) that it says to hold."""

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.version)

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def holds(self) -> int | None:
        """Version of the weights of a rollout server or a teacher; None of others."""
        return self.version if self.role in ("rollout_server", "teacher") else None

    def may_send(self, message: Message) -> bool:
        """Whether such a message may come from this peer: a rollout server commits nothing."""
        if isinstance(message, FROM_SERVERS):
            return self.role == "rollout_server"
        return not isinstance(message, FROM_RANK_0) or (self.role == "learner" and self.hello.rank == 0)

    def describe(self, now: float) -> str:
        """`'rollout-0' (pid 4711 on host1, last heard 0.4 s ago)`."""
        silent = now - self.last_heard
        return f"{self.name!r} (pid {self.hello.pid} on {self.hello.host}, last heard {silent:.1f} s ago)"


class Peers:
    def __init__(self, expected: Mapping[str, str]) -> None:
        self.expected = expected
        """The run's fingerprint, which every rollout server and learner rank must have."""
        self.by_identity: dict[str, Peer] = {}
        self.gone: dict[str, str] = {}
        """Why peers were removed, by identity, until replay/timeline.py has read it."""
        self.silent: dict[str, Hello] = {}
        """Peers that were removed because nothing came of them, by name, until one of that name comes."""
        self.outbox: list[tuple[str, Message]] = []
        """(identity, message) in order; replay/serve.py carries them, once what they tell of is in the journal."""

    def send(self, identity: str, message: Message) -> None:
        self.outbox.append((identity, message))

    def to_rank(self, rank: int, message: Message) -> None:
        """Send to a learner rank, if it is connected."""
        peer = self.rank(rank)
        if peer is not None:
            self.send(peer.identity, message)

    def to_servers(self, message: Message) -> None:
        for peer in self.role("rollout_server"):
            self.send(peer.identity, message)

    def add(self, identity: str, hello: Hello, now: float) -> Peer:
        """Admit a peer, or refresh it when it says Hello again."""
        peer = self.by_identity.get(identity)
        if peer is None:
            peer = self.by_identity[identity] = Peer(identity, hello, now, now, since=now)
        peer.hello, peer.last_heard, peer.last_acted, peer.unreachable_since = hello, now, now, None
        if hello.role == "teacher":
            peer.version = hello.version
        self.silent.pop(hello.name, None)
        return peer

    def remove(self, identity: str) -> Peer | None:
        return self.by_identity.pop(identity, None)

    def get(self, identity: str) -> Peer | None:
        return self.by_identity.get(identity)

    def role(self, role: Role) -> list[Peer]:
        return [peer for peer in self.by_identity.values() if peer.role == role]

    def rank(self, rank: int) -> Peer | None:
        return next((p for p in self.role("learner") if p.hello.rank == rank), None)

    def disagreement(self, hello: Hello) -> str | None:
        """Every key, or hash of the model folder, in which a newcomer differs from this run, as a sentence."""
        given = hello.fingerprint
        different = [
            f"{key} is {given.get(key, 'missing')} there and {value} in this run"
            for key, value in self.expected.items()
            if given.get(key) != value and concerns(hello.role, key)
        ]
        if not different:
            return None
        return f"{'; '.join(different)}; start {hello.name!r} with the run's model folder and configuration"


def learner_keys(config: Config) -> frozenset[str]:
    """Names of the keys that learner nodes besides the first one have: each its own.

    The shared key counts where none of its holders is there for rollouts alone.
    """
    others = config.shares[1:]
    shared = {SHARED} if others and all(share.learner for share in others) else set()
    return frozenset({share.node for share in others if share.learner} | shared)
