"""Policies by (incarnation, version): which are on the surviving line, lost, or not proven yet. Pure."""

from typing import NamedTuple


class Policy(NamedTuple):
    """Weights that one incarnation of the learner has made. Example: Policy(incarnation=2, version=17)."""

    incarnation: int
    version: int


class Lost(NamedTuple):
    """Policies of incarnations `first` to `last` from `version` on are not on the line any more."""

    first: int
    last: int
    version: int

    def covers(self, policy: Policy) -> bool:
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

    def is_lost(self, policy: Policy) -> bool:
        return any(lost.covers(policy) for lost in self.lost)

    def is_unproven(self, policy: Policy, *, version: int, last_committed: int) -> bool:
        """Whether no commit has named the digest of this policy: its publication may overtake its commit.

        `version` is the last that the present learner has committed, `last_committed` that any incarnation has.
        """
        of_the_present = policy.incarnation == self.incarnation or policy.version > last_committed
        return policy.version > version and of_the_present
