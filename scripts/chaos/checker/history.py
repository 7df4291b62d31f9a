"""A run rebuilt from the records of its journal: the surviving line of policies, every group's life, every server's."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from scripts.chaos.checker.bounds import Bounds, GroupId
from scripts.chaos.checker.journal import Record, arrays

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Commit:
    """One optimizer step: what was trained, by which incarnation, and the weights that it made."""

    incarnation: int
    digest: str
    groups: tuple[GroupId, ...]


class History:
    """State after all records that were applied; `wrong` and `lost` say what breaks a rule."""

    def __init__(self, async_lag: int = 0, on_stale: str = "wait", groups_per_step: int = 0) -> None:
        self.bounds, self.on_stale, self.groups_per_step = Bounds(async_lag), on_stale, groups_per_step
        self.wrong: list[str] = []
        self.lost: list[str] = []
        # ---- steps
        self.version = self.high = 0  # last committed step of the newest incarnation's line; highest one ever
        self.incarnation = self.incarnations = self.boots = 0  # the newest; starts of the learner, and of replay
        self.line: dict[int, Commit] = {}  # committed steps of the surviving line
        self.again: dict[int, Commit] = {}  # steps above the newest incarnation's version, which it has to repeat
        self.commits: dict[tuple[int, int], Commit] = {}  # by (step, incarnation)
        self.taken: dict[int, tuple[GroupId, ...]] = {}  # the newest take of each step
        self.newest_take = self.repeated_steps = 0
        self.digests: dict[int, str] = {}  # by version: what an engine that serves the version must hold
        # ---- groups
        self.accepted_attempts: set[tuple[GroupId, int]] = set()
        self.held: dict[GroupId, int] = {}  # accepted ones, by the highest version committed when they came
        self.reopened: set[GroupId] = set()  # too late for the lag bound: their prompts are leased once more
        self.dropped: dict[GroupId, list[str]] = {}  # reasons
        self._stamps: dict[GroupId, tuple[int, int]] = {}  # oldest and newest version of the trained tokens
        # ---- rollout servers
        self.leases: dict[GroupId, str] = {}  # server that holds a lease now
        self.moved: Counter[str] = Counter()  # leases that ended because their server was gone
        self.trained: Counter[str] = Counter()  # the sum over all commits
        self.sampled: defaultdict[str, set[int]] = defaultdict(set)  # versions in each server's accepted groups
        self._senders: dict[GroupId, str] = {}
        self._number, self._file, self._file_number = 0, "", 0

    def held_by(self, server: str) -> int:
        return sum(holder == server for holder in self.leases.values())

    def apply(self, record: Record) -> None:
        """The next record; kinds without a method below change nothing."""
        self._must(record.number == self._number + 1, record, f"follows record {self._number}")
        begins = record.file == self._file or record.kind == "segment"
        self._must(begins, record, "a file begins with it instead of with its segment record")
        self._number, self._file = record.number, record.file
        handler = getattr(self, f"_on_{record.kind}", None)
        if handler is not None:
            handler(record, record.fields)

    def _must(self, holds: bool, record: Record, otherwise: str) -> None:
        if not holds:
            self.wrong.append(f"{record}: {otherwise}")

    def _on_segment(self, record: Record, fields: Fields) -> None:
        self._file_number += 1
        expected = (self._file_number, f"{self._file_number:06d}.seg")
        what = f"is file {fields['number']}, {self._file_number} was expected"
        self._must((fields["number"], record.file) == expected, record, what)

    def _on_boot(self, _record: Record, fields: Fields) -> None:
        self.boots += 1
        settings = fields.get("run", {})  # of this start: a run may be resumed with others
        self.on_stale = settings.get("on_stale", self.on_stale)
        self.bounds.boot(settings.get("async_lag", self.bounds.configured))

    def _on_lag(self, record: Record, fields: Fields) -> None:
        lag, before = fields["async_lag"], self.bounds.now
        self._must(0 <= lag < before, record, f"makes the bound of the lag {lag}, it is {before}")
        self.bounds.now = lag

    def _on_learner(self, record: Record, fields: Fields) -> None:
        version, incarnation, last = fields["version"], fields["incarnation"], self.version
        self._must(incarnation > self.incarnation, record, f"incarnation {incarnation} after {self.incarnation}")
        self._must(version <= last, record, f"starts at version {version}, version {last} is the last committed")
        self.incarnation, self.incarnations = incarnation, self.incarnations + 1
        self.version = self.newest_take = version
        self.digests[version] = fields.get("digest", "")
        for step in [step for step in self.line if step > version]:
            self.again[step] = self.line.pop(step)

    def _on_lease(self, record: Record, fields: Fields) -> None:
        group = identity(fields["group"])
        self.leases[group] = name_of(fields["server"])
        lag, now = fields.get("async_lag"), self.bounds.now
        self._must(self.bounds.lease(group, lag), record, f"leases {list(group)} with lag {lag}, the bound is {now}")
        if group in self.held:
            self.lost.append(f"group {list(group)} was leased again ({record}) after it had been accepted")
        self._must(group not in self.dropped, record, f"group {list(group)} is leased after it was dropped")

    def _on_release(self, _record: Record, fields: Fields) -> None:
        server = self.leases.pop(identity(fields["group"]), "")
        self.moved[server] += fields["reason"] == "server_lost"

    def _on_group(self, record: Record, fields: Fields) -> None:
        group, server = identity(fields["group"]), name_of(fields["server"])
        self._must(group not in self.held, record, f"group {list(group)} is accepted twice")
        self.accepted_attempts.add((group, fields["attempt"]))
        self.held[group], self._senders[group] = self.high, server
        self.leases.pop(group, None)
        self.reopened.discard(group)
        found = arrays(record)
        sampled = found["versions"][found["loss_mask"] != 0]
        self.sampled[server].update(map(int, sampled))
        if sampled.size:
            self._stamps[group] = (int(sampled.min()), int(sampled.max()))

    def _on_drop(self, _record: Record, fields: Fields) -> None:
        group = identity(fields["group"])
        self.dropped.setdefault(group, []).append(str(fields["reason"]))
        self.reopened.discard(group)

    def _on_stale(self, record: Record, fields: Fields) -> None:
        group = identity(fields["group"])
        self._must(self.on_stale == "drop", record, f"on_stale is {self.on_stale}")
        self._must(group in self.held, record, f"group {list(group)} is not in the buffer")
        self.held.pop(group, None)
        self.reopened.add(group)

    def _on_take(self, record: Record, fields: Fields) -> None:
        step, groups, wanted = fields["step"], tuple(map(identity, fields["groups"])), self.groups_per_step
        self._must(step == self.version + 1, record, f"takes step {step} after version {self.version}")
        again = step in self.again or step in self.taken
        before = self.again[step].groups if step in self.again else self.taken.get(step, groups)
        self._must(groups == before, record, f"step {step} is taken again with other groups, or in another order")
        whole = len(set(groups)) == len(groups) == wanted
        self._must(whole, record, f"{len(set(groups))} groups, {wanted} make a step")
        recorded = fields.get("async_lag")
        bound = self.bounds.take(step, groups, recorded, again=again)
        self._must(bound is not None, record, f"forms step {step} under a lag of {recorded}, above its groups' bounds")
        masks = self.on_stale == "mask"
        is_masked = fields.get("masked", masks)
        self._must(again or is_masked == masks, record, f"says masked {is_masked}, and on_stale is {self.on_stale}")
        for group in groups:
            self._must(group in self.held, record, f"group {list(group)} was never accepted")
            own = self.bounds.of_step(step) if again else max(self.bounds.now, self.bounds.of_group(group))
            self._judge_age(record, step, group, None if is_masked else own)
        self.taken[step], self.newest_take = groups, step

    def _judge_age(self, record: Record, step: int, group: GroupId, bound: int | None) -> None:
        """Lag of a token: the version that is trained (step - 1) minus the version that has sampled it."""
        oldest, newest = self._stamps.get(group, (step - 1, step - 1))
        lag = step - 1 - oldest
        self._must(bound is None or lag <= bound, record, f"lag {lag} of group {list(group)} is above {bound}")
        self._must(newest < step, record, f"group {list(group)} has tokens of version {newest} in step {step}")

    def _on_commit(self, record: Record, fields: Fields) -> None:
        step, incarnation, digest = fields["step"], fields["incarnation"], fields["digest"]
        newest, earlier = self.incarnation, self.again.pop(step, None)
        self._must(incarnation == newest, record, f"by incarnation {incarnation}, {newest} is the newest")
        follows = step == self.version + 1 and step in self.taken
        self._must(follows, record, f"commits step {step}, which was not taken after version {self.version}")
        self._must(fields["again"] == (earlier is not None), record, f"says again {fields['again']} of step {step}")
        if earlier is not None:
            self.repeated_steps += 1
            what = f"step {step} has digest {digest}, {earlier.digest} when it was first done"
            self._must(earlier.digest == digest, record, what)
        groups = self.taken.get(step, ())
        self.line[step] = self.commits[step, incarnation] = Commit(incarnation, digest, groups)
        self.version, self.high, self.digests[step] = step, max(self.high, step), digest
        self.trained.update(self._senders[group] for group in groups if group in self._senders)

    def _on_diverged(self, record: Record, fields: Fields) -> None:
        """Weights that cannot be made again: allowed by replay.on_divergence, and wrong where nothing changed.

        With equal digests a guard has rolled the run back: what was trained since is dropped.
        """
        step = fields["step"]
        rolls_back = fields["expected"] == fields["found"]
        self._must(rolls_back, record, f"step {step} diverged: {fields['expected']} became {fields['found']}")
        gone = {s: self.taken.get(s, ()) for s in (*self.again, *self.taken) if s > step}
        for later, groups in gone.items():
            self.bounds.dissolve(later, groups)
        for group in map(identity, fields.get("dropped", ())):
            self.held.pop(group, None)
            self.dropped.setdefault(group, []).append("rolled_back")
        for group in map(identity, fields["superseded"]):  # these are sampled anew
            self.held.pop(group, None)
            self.reopened.add(group)
        for later in gone:
            self.again.pop(later, None)
            self.taken.pop(later, None)


def identity(group: list[int]) -> GroupId:
    """Group id of a record: (pass over the data, prompt index)."""
    return group[0], group[1]


def name_of(peer: str) -> str:
    """Replay knows a server by its name, a dot and a random part."""
    return peer.rpartition(".")[0]
