"""The line of policies: which groups made which version, and which policies are lost. Pure.

A learner that resumes at version v takes the steps after v again: the same groups in the same order, and the weights
must get the digests that the journal has. So a step stays on the line until a durable checkpoint is behind it.

    Example: steps 3 and 4 are committed, batch 5 is out. Of a learner that comes back at version 2 all three are ahead.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgpack

from replay.journal.format import Location
from replay.state.leases import GroupId


class TakenGroup(NamedTuple):
    """A group of a batch in the journal; `attempt` is the last that was leased."""

    group_id: GroupId
    attempt: int
    min_version: int
    location: Location


@dataclass(slots=True)
class LineStep:
    """The batch of one step, and the digest of the weights that it made; empty before its commit."""

    groups: list[TakenGroup]
    async_lag: int
    """Bound of the lag that its groups were admitted under."""
    is_masked: bool
    """Whether tokens above that bound were taken out of the loss."""
    digest: str = ""
    _packed: bytes = b""

    @property
    def packed(self) -> bytes:
        """Its groups as msgpack, made once: a snapshot of a line without checkpoints has all of them."""
        self._packed = self._packed or cast(bytes, msgpack.packb(self.groups))
        return self._packed


@dataclass(slots=True)
class PolicyLine:
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

    def groups_ahead(self, version: int) -> list[TakenGroup]:
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


class PolicyVersion(NamedTuple):
    """Weights that one incarnation of the learner has made. Example: PolicyVersion(incarnation=2, version=17)."""

    incarnation: int
    version: int


class Lost(NamedTuple):
    """Policies of incarnations `first` to `last` from `version` on are not on the line any more."""

    first: int
    last: int
    version: int

    def covers(self, policy: PolicyVersion) -> bool:
        return self.first <= policy.incarnation <= self.last and policy.version >= self.version


class Policies:
    """The present incarnation, what it can have published, and what its predecessors have lost."""

    def __init__(self) -> None:
        self.incarnation = 0
        """Starts of the learner so far."""
        self.published = 0
        """Newest version that the present learner can have made."""
        self.lost: list[Lost] = []

    def possible(self, version: int) -> None:
        """Tokens of `version` are possible from now on: its batch goes out, or the learner has published it.

        The latter alone would not do: it comes on another socket than the groups, which may overtake it.
        """
        self.published = max(self.published, version)

    def lose(self, version: int, *, first: int = 0, last: int) -> None:
        """Policies from `version` on that incarnations `first` to `last` made are not on the line (any more)."""
        others = [old for old in self.lost if not (first <= old.first and old.last <= last and version <= old.version)]
        self.lost = [*others, Lost(first, last, version)]

    def is_lost(self, policy: PolicyVersion) -> bool:
        return any(lost.covers(policy) for lost in self.lost)

    def is_unproven(self, policy: PolicyVersion, *, version: int, last_committed: int) -> bool:
        """Whether no commit has named the digest of this policy: its publication may overtake its commit.

        `version` is the last that the present learner has committed, `last_committed` that any incarnation has.
        """
        of_the_present = policy.incarnation == self.incarnation or policy.version > last_committed
        return policy.version > version and of_the_present
