"""Which rollout server did what in a run, and how far the run is, rebuilt from the records of its journal."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.chaos.checker.history import GroupId, identity
from scripts.chaos.checker.journal import Record, arrays


@dataclass(slots=True)
class Account:
    """State after all records that were applied."""

    version: int = 0
    """Last committed step of the newest incarnation's line."""
    high: int = 0
    """Highest step that was ever committed."""
    taken: int = 0
    """Step of the newest batch."""
    incarnations: int = 0
    """Starts of the learner."""
    boots: int = 0
    """Starts of replay."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the learner's weights by version: what an engine that serves the version must hold."""
    leases: dict[GroupId, str] = field(default_factory=dict)
    """Rollout server that holds a lease now."""
    moved: Counter[str] = field(default_factory=Counter)
    """Leases that ended because their server was gone, by server."""
    trained: Counter[str] = field(default_factory=Counter)
    """Groups by the server that sent them."""
    shares: dict[int, Counter[str]] = field(default_factory=dict)
    """The same for each step."""
    sampled: dict[str, set[int]] = field(default_factory=dict)
    """Versions of the tokens in the accepted groups of each server."""
    _senders: dict[GroupId, str] = field(default_factory=dict)
    _batches: dict[int, list[GroupId]] = field(default_factory=dict)

    def held_by(self, server: str) -> int:
        """Leases that a rollout server holds now."""
        return sum(holder == server for holder in self.leases.values())

    def apply(self, record: Record) -> None:
        """The next record."""
        fields = record.fields
        match record.kind:
            case "boot":
                self.boots += 1
            case "learner":
                self.incarnations += 1
                self.version = self.taken = fields["version"]
                self.digests[self.version] = fields["digest"]
            case "lease":
                self.leases[identity(fields["group"])] = _name(fields["server"])
            case "release":
                server = self.leases.pop(identity(fields["group"]), "")
                self.moved[server] += fields["reason"] == "server_lost"
            case "group":
                self._group(record)
            case "take":
                self.taken = fields["step"]
                self._batches[self.taken] = [identity(group) for group in fields["groups"]]
            case "commit":
                self._commit(fields["step"], fields["digest"])

    def _commit(self, step: int, digest: str) -> None:
        self.version, self.high = step, max(self.high, step)
        self.digests[step] = digest
        self.shares[step] = Counter(self._served(step))
        self.trained.update(self.shares[step])

    def _served(self, step: int) -> Iterator[str]:
        return (self._senders[group] for group in self._batches.get(step, []) if group in self._senders)

    def _group(self, record: Record) -> None:
        group, server = identity(record.fields["group"]), _name(record.fields["server"])
        self.leases.pop(group, None)
        self._senders[group] = server
        found = arrays(record)
        self.sampled.setdefault(server, set()).update(map(int, found["versions"][found["loss_mask"] != 0]))


def _name(peer: str) -> str:
    """Replay knows a server by its name, a dot and a random part."""
    return peer.rpartition(".")[0]
