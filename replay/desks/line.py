"""The line of policies: which groups made which version, as far back as a kept checkpoint needs it. Pure.

A learner that resumes at version v takes the steps after v again: the same groups in the same order, and the weights
must get the digests that the journal has. So a step stays on the line until a durable checkpoint is behind it.

    Example: steps 3 and 4 are committed and batch 5 is out; a learner comes back with the checkpoint of version 2.
    Steps 3, 4 and 5 are ahead of it; for 3 and 4 digests are known, 5 was taken and never committed.
"""

from dataclasses import dataclass, field

from replay.desks.leases import GroupId
from replay.journal.format import Location


@dataclass(frozen=True, slots=True)
class Taken:
    """A group of a batch, and where the journal has it."""

    group_id: GroupId
    attempt: int
    """The last one that was leased, which the group need not be of."""
    min_version: int
    location: Location


@dataclass(slots=True)
class LineStep:
    """The batch of one step, and the digest of the weights that it made; empty before its commit."""

    groups: list[Taken]
    digest: str = ""


@dataclass(slots=True)
class Line:
    """Steps by number, without a gap."""

    steps: dict[int, LineStep] = field(default_factory=dict)
    initial: tuple[int, str] | None = None
    """(version, digest) that the oldest step here was made from, as its learner said."""

    @property
    def last(self) -> int:
        return max(self.steps, default=0)

    @property
    def last_committed(self) -> int:
        """The last step that some incarnation has committed; 0 for none."""
        return max((step for step, made in self.steps.items() if made.digest), default=0)

    def digest(self, version: int) -> str:
        if self.initial is not None and self.initial[0] == version:
            return self.initial[1]
        made = self.steps.get(version)
        return made.digest if made is not None else ""

    def correct(self, version: int, digest: str) -> None:
        """A later incarnation has made this version with other weights."""
        if version in self.steps:
            self.steps[version].digest = digest
        else:
            self.initial = (version, digest)

    def ahead(self, version: int) -> list[int]:
        return sorted(step for step in self.steps if step > version)

    def groups_ahead(self, version: int) -> list[Taken]:
        """Groups of the steps after `version`, in order."""
        return [taken for step in self.ahead(version) for taken in self.steps[step].groups]

    def reaches(self, version: int) -> bool:
        """Whether every step after `version` is here, up to the last."""
        ahead = self.ahead(version)
        return ahead == list(range(version + 1, version + 1 + len(ahead)))

    def forget(self, version: int) -> None:
        """A durable checkpoint of `version` makes the steps up to it superfluous."""
        known = self.digest(version)
        for step in [step for step in self.steps if step <= version]:
            del self.steps[step]
        if known:
            self.initial = (version, known)

    def first_segment(self) -> int | None:
        """Number of the oldest file of the journal that the line needs."""
        return min((taken.location.segment for made in self.steps.values() for taken in made.groups), default=None)
