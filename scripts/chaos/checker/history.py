"""The surviving line of policies and the life of every group, rebuilt from the records of a journal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.chaos.checker.journal import Record, arrays

GroupId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the run promised."""

    async_lag: int
    on_stale: str
    groups_per_step: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One optimizer step: what was trained, by which incarnation, and the weights that it made."""

    step: int
    incarnation: int
    digest: str
    groups: tuple[GroupId, ...]


class History:
    """State after all records that were applied; `wrong` and `lost` say what breaks a rule."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self.line: dict[int, Commit] = {}
        """Committed steps of the surviving line."""
        self.again: dict[int, Commit] = {}
        """Steps of earlier incarnations above the version of the newest one, which has to repeat them."""
        self.commits: dict[tuple[int, int], Commit] = {}
        """By (step, incarnation)."""
        self.taken: dict[int, tuple[GroupId, ...]] = {}
        """The newest take of each step."""
        self.accepted_attempts: set[tuple[GroupId, int]] = set()
        self.held: dict[GroupId, int] = {}
        """Accepted groups, by the highest version that was committed when they came."""
        self.reopened: set[GroupId] = set()
        """Groups that came too late for the lag bound, and whose prompts are leased once more."""
        self.dropped: dict[GroupId, list[str]] = {}
        self.repeated_steps = 0
        self.high = 0
        self.incarnation = 0
        self._stamps: dict[GroupId, tuple[int, int]] = {}
        self._number = 0
        self._file, self._file_number = "", 0
        self._handlers: dict[str, Callable[[Record, dict[str, Any]], None]] = {
            "segment": self._segment,
            "learner": self._learner,
            "lease": self._lease,
            "group": self._group,
            "drop": self._drop,
            "stale": self._stale,
            "take": self._take,
            "commit": self._commit,
            "diverged": self._diverged,
        }

    @property
    def version(self) -> int:
        """Last committed version of the surviving line."""
        return max(self.line, default=0)

    def apply(self, record: Record) -> None:
        """The next record."""
        if record.number != self._number + 1:
            self.wrong.append(f"{record}: follows record {self._number}")
        self._number = record.number
        if record.file != self._file and record.kind != "segment":
            self.wrong.append(f"{record}: a file begins with it instead of with its segment record")
        self._file = record.file
        handler = self._handlers.get(record.kind)
        if handler is not None:
            handler(record, record.fields)

    def _segment(self, record: Record, fields: dict[str, Any]) -> None:
        self._file_number += 1
        if fields["number"] != self._file_number or record.file != f"{self._file_number:06d}.seg":
            self.wrong.append(f"{record}: is file {fields['number']}, {self._file_number} was expected")

    def _learner(self, record: Record, fields: dict[str, Any]) -> None:
        version = fields["version"]
        if fields["incarnation"] <= self.incarnation:
            self.wrong.append(f"{record}: incarnation {fields['incarnation']} after {self.incarnation}")
        if version > self.version:
            self.wrong.append(f"{record}: starts at version {version}, version {self.version} is the last committed")
        self.incarnation = fields["incarnation"]
        for step in [step for step in self.line if step > version]:
            self.again[step] = self.line.pop(step)

    def _lease(self, record: Record, fields: dict[str, Any]) -> None:
        group = identity(fields["group"])
        if group in self.held:
            self.lost.append(f"group {list(group)} was leased again ({record}) after it had been accepted")
        if group in self.dropped:
            self.wrong.append(f"{record}: group {list(group)} is leased after it was dropped")

    def _group(self, record: Record, fields: dict[str, Any]) -> None:
        group = identity(fields["group"])
        if group in self.held:
            self.wrong.append(f"{record}: group {list(group)} is accepted twice")
        self.accepted_attempts.add((group, fields["attempt"]))
        self.held[group] = self.high
        self.reopened.discard(group)
        found = arrays(record)
        sampled = found["versions"][found["loss_mask"] != 0]
        if sampled.size:
            self._stamps[group] = (int(sampled.min()), int(sampled.max()))

    def _drop(self, _record: Record, fields: dict[str, Any]) -> None:
        group = identity(fields["group"])
        self.dropped.setdefault(group, []).append(str(fields["reason"]))
        self.reopened.discard(group)

    def _stale(self, record: Record, fields: dict[str, Any]) -> None:
        group = identity(fields["group"])
        if self.rules.on_stale != "drop":
            self.wrong.append(f"{record}: on_stale is {self.rules.on_stale}")
        if self.held.pop(group, None) is None:
            self.wrong.append(f"{record}: group {list(group)} is not in the buffer")
        self.reopened.add(group)

    def _take(self, record: Record, fields: dict[str, Any]) -> None:
        step, groups = fields["step"], tuple(map(identity, fields["groups"]))
        if step != self.version + 1:
            self.wrong.append(f"{record}: takes step {step} after version {self.version}")
        before = self.again[step].groups if step in self.again else self.taken.get(step, groups)
        if groups != before:
            self.wrong.append(f"{record}: step {step} is taken again with other groups, or in another order")
        if len(groups) != self.rules.groups_per_step or len(set(groups)) != len(groups):
            self.wrong.append(f"{record}: {len(set(groups))} groups, {self.rules.groups_per_step} make a step")
        self.wrong += [f"{record}: group {list(g)} was never accepted" for g in groups if g not in self.held]
        self.wrong += self._over_age(record, step, groups)
        self.taken[step] = groups

    def _over_age(self, record: Record, step: int, groups: Iterable[GroupId]) -> Iterable[str]:
        """Lag of a token: the version that is trained (step - 1) minus the version that has sampled it."""
        for group in groups:
            if group not in self._stamps:
                continue
            oldest, newest = self._stamps[group]
            lag = step - 1 - oldest
            if lag > self.rules.async_lag and self.rules.on_stale != "mask":
                yield f"{record}: lag {lag} of group {list(group)} is above {self.rules.async_lag}"
            if newest > step - 1:
                yield f"{record}: group {list(group)} has tokens of version {newest} in step {step}"

    def _commit(self, record: Record, fields: dict[str, Any]) -> None:
        step, incarnation, digest = fields["step"], fields["incarnation"], fields["digest"]
        if incarnation != self.incarnation:
            self.wrong.append(f"{record}: by incarnation {incarnation}, {self.incarnation} is the newest")
        if step != self.version + 1 or step not in self.taken:
            self.wrong.append(f"{record}: commits step {step}, which was not taken after version {self.version}")
        earlier = self.again.pop(step, None)
        if earlier is not None:
            self.repeated_steps += 1
            if earlier.digest != digest:
                self.wrong.append(f"{record}: step {step} has digest {digest}, {earlier.digest} when it was first done")
        if bool(fields["again"]) != (earlier is not None):
            self.wrong.append(f"{record}: says again {fields['again']} of step {step}")
        commit = Commit(step, incarnation, digest, self.taken.get(step, ()))
        self.line[step] = self.commits[step, incarnation] = commit
        self.high = max(self.high, step)

    def _diverged(self, record: Record, fields: dict[str, Any]) -> None:
        """Weights that cannot be made again: allowed by replay.on_divergence, and wrong where nothing changed."""
        step = fields["step"]
        self.wrong.append(f"{record}: step {step} diverged: {fields['expected']} became {fields['found']}")
        for group in map(identity, fields["superseded"]):  # these are sampled anew
            self.held.pop(group, None)
            self.reopened.add(group)
        for later in [s for s in (*self.again, *self.taken) if s > step]:
            self.again.pop(later, None)
            self.taken.pop(later, None)


def identity(group: list[int]) -> GroupId:
    """Group id of a record: (pass over the data, prompt index)."""
    return group[0], group[1]
