"""When replay may say what: nothing leaves before the journal has what it tells of. No socket; time is an argument."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from configs.errors import coded
from replay import messages as m
from replay.channel import Message
from replay.journal import Journal, JournalReadOnly
from replay.waits import Waits

log = logging.getLogger(__name__)

SLOW_DISK_S = 5.0
"""An answer that waits longer for the journal is a wait with a name."""


class _Answer(NamedTuple):
    number: int
    """Of the last record that was appended before it."""
    since: float
    identity: str
    message: Message


class Outlet:
    """Answers between the outbox and the channel. The rule of what is durable before what is said:

    - An answer (Ack, Lease, Batch, Proceed, Welcome, ...) leaves once every record that was appended before it is
      written: no end of replay loses it then. With replay.fsync `every` it is on the disk, too.
    - A Cursor, which a durable checkpoint relies on, leaves once those records are on the disk.
    - What promises nothing leaves at once: a Status, replay's beats (replay/serve.py) and, where the journal cannot be
      written, how the run ended.
    """

    def __init__(
        self,
        journal: Journal,
        outbox: list[tuple[str, Message]],
        waits: Waits,
        counters: Counter[str],
        fail: Callable[[str], None],
    ) -> None:
        self._journal, self._outbox, self._waits, self._counters, self._fail = journal, outbox, waits, counters, fail
        self._waiting, self._cursors = deque[_Answer](), deque[_Answer]()
        self.unwritten_since: float | None = None
        """Since when the journal could not be written."""

    @property
    def is_empty(self) -> bool:
        """Whether everything was said."""
        return not (self._outbox or self._waiting or self._cursors)

    def say_once_on_disk(self, identity: str, message: Message, now: float) -> None:
        """Put an answer here that leaves once the journal, as it is now, is on the disk."""
        self._cursors.append(_Answer(self._journal.want_sync(), now, identity, message))

    def sayable(self, now: float, *, has_ended: bool) -> list[tuple[str, Message]]:
        """What may be sent now, in order; to be called again when the journal has come further."""
        number, outbox = self._journal.submit(), list(self._outbox)
        self._outbox.clear()
        said = [item for item in outbox if isinstance(item[1], m.Status)]
        self._waiting += [_Answer(number, now, *item) for item in outbox if not isinstance(item[1], m.Status)]
        for waiting, reached in ((self._waiting, self._journal.written), (self._cursors, self._journal.on_disk)):
            while waiting and waiting[0].number <= reached:
                answer = waiting.popleft()
                said.append((answer.identity, answer.message))
        self._look_at_disk(now)
        if has_ended and self.unwritten_since is not None:
            said += [(each.identity, each.message) for each in self._waiting if isinstance(each.message, m.Goodbye)]
            self._waiting.clear()
            self._cursors.clear()
        return said

    def _look_at_disk(self, now: float) -> None:
        """Name what keeps the journal from its disk; end the run where waiting does not help."""
        problem, first = self._journal.problem, [each[0].since for each in (self._waiting, self._cursors) if each]
        if isinstance(problem, JournalReadOnly):
            self.unwritten_since = now
            self._fail(coded(f"replay cannot go on: {problem}", problem.code))
        elif problem is not None or (first and now - min(first) > SLOW_DISK_S):
            if self.unwritten_since is None:
                why = str(problem or f"nothing was written for {SLOW_DISK_S:g} s").partition("\n")[0]
                self.unwritten_since, self._waits.disk = now, (now, why)
                self._counters["journal_full"] += 1
                kind = "slow" if problem is None else "full"
                log.error("replay: the journal waits for its disk, and nothing is acknowledged: %s [%s]", why, kind)
        elif self.unwritten_since is not None:
            log.info("replay: the journal is written again after %.1f s", now - self.unwritten_since)
            self.unwritten_since = self._waits.disk = None
