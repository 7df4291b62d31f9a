"""Who did what in a run: its journal record by record, and what the witness in each rollout server wrote down."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaos.journal import Record, Tail, arrays

GroupId = tuple[int, int]


class Account:
    """`tell` it every record of the journal, as it comes or afterwards."""

    def __init__(self) -> None:
        self.version = 0
        """Last committed step."""
        self.incarnations = 0
        """Starts of the learner."""
        self.boots = 0
        """Starts of replay."""
        self.digests: dict[int, str] = {}
        """Of the learner's weights, by version: what an engine that serves the version must hold."""
        self.leases: dict[GroupId, str] = {}
        """Rollout server that holds a lease now."""
        self.leased: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        """Leases that ended because their server was gone, by server."""
        self.accepted: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        """Groups, by the server that sent them."""
        self.shares: dict[int, Counter[str]] = {}
        """The same for each step."""
        self.sampled: dict[str, set[int]] = {}
        """Versions of the tokens in the accepted groups of each server."""
        self._senders: dict[GroupId, str] = {}
        self._taken: dict[int, list[GroupId]] = {}

    def held_by(self, server: str) -> int:
        """Leases that a rollout server holds now."""
        return sum(holder == server for holder in self.leases.values())

    def tell(self, record: Record) -> None:
        """The next record."""
        fields = record.fields
        match record.kind:
            case "boot":
                self.boots += 1
            case "learner":
                self.incarnations += 1
                self.digests[fields["version"]] = fields["digest"]
            case "lease":
                server = _name(fields["server"])
                self.leases[_id(fields["group"])] = server
                self.leased[server] += 1
            case "release":
                server = self.leases.pop(_id(fields["group"]), "")
                self.moved[server] += fields["reason"] == "server_lost"
            case "group":
                self._group(record)
            case "take":
                self._taken[fields["step"]] = [_id(group) for group in fields["groups"]]
            case "commit":
                self.version = fields["step"]
                self.digests[self.version] = fields["digest"]
                taken = self._taken.get(self.version, [])
                share = Counter(self._senders[group] for group in taken if group in self._senders)
                self.shares[self.version] = share
                self.trained.update(share)

    def _group(self, record: Record) -> None:
        group, server = _id(record.fields["group"]), _name(record.fields["server"])
        self.leases.pop(group, None)
        self.accepted[server] += 1
        self._senders[group] = server
        found = arrays(record)
        self.sampled.setdefault(server, set()).update(map(int, found["versions"][found["loss_mask"] != 0]))


class Following:
    """The account of a run that goes on."""

    def __init__(self, folder: Path) -> None:
        self.account = Account()
        self._tail = Tail(folder)

    def poll(self) -> Account:
        """Take in what is new."""
        for record in self._tail.poll():
            self.account.tell(record)
        return self.account


@dataclass(slots=True)
class Diary:
    """What a witness has written (scripts/elastic/witness.py), in its order."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> "Diary":
        """Read new lines; a server that was killed may leave a torn one."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self

    def first(self, event: str, since: float = 0.0) -> dict[str, Any] | None:
        """The first event of a kind at or after a moment."""
        return next((e for e in self.events if e["event"] == event and e["at"] >= since), None)

    def versions(self, event: str) -> list[int]:
        """Versions of all events of a kind."""
        return [e["version"] for e in self.events if e["event"] == event]


def _id(group: list[int]) -> GroupId:
    return group[0], group[1]


def _name(identity: str) -> str:
    """Replay knows a server by its name, a dot and a random part."""
    return identity.rpartition(".")[0]
