"""Bounds of the lag: configured at each start of replay, lowered by guards, kept by groups from their lease on."""

from collections.abc import Iterable

GroupId = tuple[int, int]


class Bounds:
    """Highest lag of a token in the loss; what older journals do not record is the bound in force."""

    def __init__(self, configured: int) -> None:
        self.configured = self.now = configured
        self._of_group: dict[GroupId, int] = {}
        self._of_step: dict[int, int] = {}  # the highest that a batch of the step was formed under

    def boot(self, configured: int) -> None:
        """Another configured bound takes the place of one that a guard has lowered."""
        if configured != self.configured:
            self.configured = self.now = configured

    def of_group(self, group: GroupId) -> int:
        return self._of_group.get(group, self.now)

    def of_step(self, step: int) -> int:
        return self._of_step.get(step, self.now)

    def lease(self, group: GroupId, recorded: int | None) -> bool:
        """A lease keeps the bound of the one before it, or has the one in force; whether it does."""
        allowed = max(self.now, self.of_group(group))
        self._of_group[group] = lag = self.now if recorded is None else recorded
        return lag <= allowed

    def take(self, step: int, groups: Iterable[GroupId], recorded: int | None, *, again: bool) -> int | None:
        """The bound of a batch, which is that of its groups or the one in force; None where it is above both."""
        allowed = self.of_step(step) if again else max([self.now, *map(self.of_group, groups)])
        lag = allowed if recorded is None else recorded
        self._of_step[step] = max(self._of_step.get(step, 0), lag)
        return lag if lag <= allowed else None

    def dissolve(self, step: int, groups: Iterable[GroupId]) -> None:
        """The batch of a step is none any more: its groups have its bound from now on."""
        for group in groups:
            self._of_group[group] = max(self.of_group(group), self.of_step(step))
