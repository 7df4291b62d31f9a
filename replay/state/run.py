"""The state of a run: what the journal gives back after a crash. It changes by replay/state/apply.py alone."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from configs.schema import Config
from replay.data import PromptSource
from replay.journal import Journal, Location
from replay.messages import Group, Welcome
from replay.state.answers import kept
from replay.state.buffer import GroupBuffer
from replay.state.evaluation_parts import EvaluationPart
from replay.state.evaluations import EvaluationBoard
from replay.state.leases import GroupId, Leases, SlotState
from replay.state.line import Policies
from replay.state.partials import Partials


class RunState:
    """Prompts, leases, groups, the line of policies and evaluations. No socket, no clock."""

    def __init__(
        self, config: Config, source: PromptSource, journal: Journal, *, parts: Iterable[EvaluationPart]
    ) -> None:
        self.config, self.source, self.journal = config, source, journal
        self.buffer = GroupBuffer(config.rollout.groups_per_step, config.replay.async_lag, config.replay.on_stale)
        self.counters: Counter[str] = self.buffer.counters
        self.leases = Leases(config.replay.lease_s, config.replay.max_attempts)
        if config.scoring is not None:
            self.leases.quiet_s = max(config.replay.lease_s, config.scoring.longest_s)
        self.policies = Policies()
        self.partials = Partials(config.rollout.group_size, config.rollout.max_new_tokens, self.counters)
        """What running answers have got so far, as far as their servers have told it. Not journalled."""
        self.board = EvaluationBoard(parts, config.evaluation.deadline_s)
        self.bus_address: str | None = None
        self.teacher_buses: dict[str, str] = {}
        """Of teachers that the learner refreshes, by name; rank 0 says so in each Hello."""
        self.started: list[str] = []
        """Rank 0's socket of each incarnation, whose name is of that one process."""
        self.diverging: tuple[int, str, str] | None = None
        """(step, expected, found) of a divergence that is noticed and not carried out yet."""
        self.changed: dict[str, str] = {}
        """Settings that decide which weights a step makes, and were others when the journal's steps were made."""
        self.again: deque[GroupId] = deque()
        """Prompts whose groups a restart has lost; leased before the source goes on."""
        self.flat_drops = 0  # groups that the filter has dropped since the last batch was taken
        self.checkpoint_asked = False
        """The launcher is about to end the run, and waits for a checkpoint."""
        self.proceeding = 0  # step that some rank may have begun, because Proceed went out

    @property
    def newest_possible(self) -> int:
        """No token can be of a newer version: the learner makes version s only from a batch s that it got from here."""
        return max(self.policies.published, self.buffer.version)

    def welcome(self) -> Welcome:
        """The run as a newcomer needs it."""
        return Welcome(
            incarnation=self.policies.incarnation,
            version=self.buffer.version,
            bus_address=self.bus_address,
            resumes_until=self.buffer.line.last_committed,
        )

    def upcoming(self) -> GroupId:
        return self.again[0] if self.again else self.source.peek()

    def next_prompt(self) -> tuple[GroupId, dict[str, Any]]:
        if self.again:
            group_id = self.again.popleft()
            return group_id, self.source.row(group_id[1])
        pass_, index, row = self.source.next()
        return (pass_, index), row

    def lose(self, version: int, *, first: int = 0, last: int) -> None:
        """Policies from `version` on of these incarnations are off the line, and so are tokens of running answers."""
        self.policies.lose(version, first=first, last=last)
        self.partials.forget_newer(version - 1)

    def forget_groups(self, version: int, again: deque[GroupId]) -> None:
        """Begin at a checkpoint without its journal: the prompts of `again` are leased before the source goes on."""
        self.buffer.slots.clear()
        self.buffer.line.steps.clear()
        self.buffer.line.initial = None
        self.buffer.version = version
        self.again = again

    def load_group(self, location: Location) -> Group:
        """A group as it is trained: without the answers that are left out of it. Raises JournalError."""
        group = self.journal.read(location)
        assert isinstance(group, Group)
        return kept(group)

    def load_groups(self) -> None:
        """Have every buffered group in memory."""
        for slot in self.buffer.slots.values():
            if slot.state is SlotState.BUFFERED and slot.group is None:
                assert slot.location is not None
                slot.group = self.load_group(slot.location)

    def first_segment(self) -> int:
        """Number of the oldest file of the journal that is still needed."""
        held = [slot.location.segment for slot in self.buffer.slots.values() if slot.location is not None]
        others = [self.buffer.line.first_segment(), self.board.first_segment()]
        return min([self.journal.segment, *held, *(segment for segment in others if segment is not None)])
