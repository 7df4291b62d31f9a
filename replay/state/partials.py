"""What running answers have got so far, as their servers tell with each Renew (replay.partial_rollouts). No socket.

When a lease comes back because its server died, the next lease of the prompt brings these tokens as prefixes. Nothing
here is journalled: after a restart of replay the servers tell everything again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.messages import Float32, Int32, Renew
from replay.state.leases import INTERRUPTIONS, GroupId, Slot
from replay.state.validation import Bounds, id_problem, logprob_problem

MAX_BYTES = 1024**3
TOKEN = np.dtype([("id", np.int32), ("logprob", np.float32), ("version", np.int32)])
TOKEN_BYTES = TOKEN.itemsize
ANSWER_BYTES = 512
"""The objects that hold an answer."""
FINISHED = ("", "stop", "length")
"""By the last number of a Renew.progress entry."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one entry of Renew.progress says: answer `answer` had `start` tokens, and has got these.

    `finished` is 0 while it goes on, 1 when it ended by a stop token, 2 by its length.
    """

    answer: int
    start: int
    token_ids: Int32
    logprobs: Float32
    versions: Int32
    finished: int


@dataclass(slots=True)
class _Answer:
    attempt: int = 0
    """Lease that told last."""
    floor: int = 0
    """Version of the last token that this attempt told; a later token is not older."""
    packed: bytearray = field(default_factory=bytearray)
    """Its tokens, one TOKEN each."""
    finished: int = 0
    broken: bool = False
    """A piece is missing or was thrown away: nothing is taken until a server tells it from the start."""

    @property
    def size(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def tokens(self) -> NDArray[np.void]:
        """[size] TOKEN; a copy, for a buffer of which there is a view cannot grow."""
        return np.frombuffer(bytes(self.packed), TOKEN)

    def add(self, told: Told) -> None:
        tokens = np.empty(told.token_ids.size, TOKEN)
        tokens["id"], tokens["logprob"], tokens["version"] = told.token_ids, told.logprobs, told.versions
        self.packed += tokens.tobytes()
        self.finished = told.finished
        if told.versions.size:
            self.floor = int(told.versions[-1])


class Partials:
    """The tokens of running answers, of at most `max_bytes`; the groups that began first are thrown away first."""

    def __init__(self, group_size: int, max_new_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        self.group_size, self.max_new_tokens, self.max_bytes = group_size, max_new_tokens, max_bytes
        self.counters: Counter[str] = Counter()
        """`partials_refused`: reports of what cannot be; `partials_evicted`: groups thrown away for want of memory;
        `partials_too_old`: answers with a token older than the next lease allows; `partials_used` and
        `partial_tokens_used`: answers and tokens that leases were given."""
        self.num_bytes = 0
        """Memory held, by count of tokens and answers."""
        self._groups: dict[GroupId, list[_Answer]] = {}

    def take(self, renew: Renew, held: Mapping[int, Slot], bounds: Bounds) -> list[str]:
        """Take in what a Renew tells; what is wrong with it, a sentence for each answer that is forgotten for it.

        `held` has, by position in `renew.leases`, the slots of those leases that the sender does hold. What it tells of
        others is passed over: they were given to another server.
        """
        problem = _shape_problem(renew)
        if problem is not None:
            return [self._refuse(problem)]
        problems, start = [], 0
        for position, answer, before, count, finished in renew.progress:
            tokens = slice(start, start + count)
            start += count
            slot = held.get(position)
            if slot is None:
                continue
            told = Told(
                answer, before, renew.token_ids[tokens], renew.logprobs[tokens], renew.versions[tokens], finished
            )
            problem = self.note(slot.group_id, slot.attempt, told, slot.min_version, bounds)
            if problem is not None:
                problems.append(f"group {slot.group_id}, attempt {slot.attempt}: {problem}")
        return problems

    def note(self, group_id: GroupId, attempt: int, told: Told, min_version: int, bounds: Bounds) -> str | None:
        """Take in what was told of one answer; what is wrong with it, or None. Then the answer is forgotten.

        `told.start` 0 begins the answer anew; else it is the number of tokens that are here already.
        """
        if not 0 <= told.answer < self.group_size:
            return self._refuse(f"answer {told.answer} of {self.group_size}")
        answer = (self._groups.get(group_id) or self._begin(group_id))[told.answer]
        if attempt < answer.attempt:
            return self._refuse(
                f"answer {told.answer}: attempt {attempt} tells, and attempt {answer.attempt} has told before"
            )
        if attempt > answer.attempt:  # another server: it may be of an older version than the one before
            answer.attempt, answer.floor = attempt, 0
        if told.start == 0:
            self._clear(answer, broken=False)
            answer.floor = 0
        if answer.broken:
            return None
        problem = self._problem(answer, told, min_version, bounds)
        if problem is not None:
            self._clear(answer, broken=True)
            return self._refuse(f"answer {told.answer}: {problem}")
        answer.add(told)
        self.num_bytes += TOKEN_BYTES * told.token_ids.size
        self._make_room()
        return None

    def _refuse(self, problem: str) -> str:
        self.counters["partials_refused"] += 1
        return problem

    def prefix(self, group_id: GroupId, min_version: int) -> dict[str, Any]:
        """The `prefix_*` fields of a Lease; empty when there is nothing to go on from.

        An answer with a token older than `min_version` is forgotten: it starts anew as a whole.
        """
        answers = self._groups.get(group_id, [])
        for answer in answers:
            if answer.packed and answer.tokens()["version"].min() < min_version:
                self._clear(answer, broken=True)
                self.counters["partials_too_old"] += 1
        used = [answer for answer in answers if answer.packed]
        if not used:
            return {}
        tokens = np.concatenate([answer.tokens() for answer in answers])
        self.counters["partials_used"] += len(used)
        self.counters["partial_tokens_used"] += tokens.size
        return {
            "prefix_finished": [FINISHED[answer.finished] for answer in answers],
            "prefix_lengths": np.array([answer.size for answer in answers], np.int32),
            "prefix_token_ids": tokens["id"],
            "prefix_logprobs": tokens["logprob"],
            "prefix_versions": tokens["version"],
        }

    def released(self, group_id: GroupId, reason: str) -> None:
        """A lease has ended without a group: its answers are kept only when they cannot have been the reason."""
        if reason not in INTERRUPTIONS:
            self.forget(group_id)

    def forget(self, group_id: GroupId) -> None:
        """The group is here, or will never be trained. Unknown ones are ignored."""
        answers = self._groups.pop(group_id, [])
        self.num_bytes -= sum(ANSWER_BYTES + len(answer.packed) for answer in answers)

    def forget_newer(self, version: int) -> int:
        """Forget answers with a token newer than `version`; how many.

        For a learner that goes on from `version`: it makes the versions above anew, perhaps not the same.
        """
        known = [answer for answers in self._groups.values() for answer in answers if answer.packed]
        newer = [answer for answer in known if answer.tokens()["version"].max() > version]
        for answer in newer:
            self._clear(answer, broken=True)
        return len(newer)

    def _begin(self, group_id: GroupId) -> list[_Answer]:
        answers = self._groups[group_id] = [_Answer() for _ in range(self.group_size)]
        self.num_bytes += ANSWER_BYTES * self.group_size
        return answers

    def _clear(self, answer: _Answer, *, broken: bool) -> None:
        self.num_bytes -= len(answer.packed)
        answer.packed, answer.finished, answer.broken = bytearray(), 0, broken

    def _make_room(self) -> None:
        """Throw away the tokens of the oldest groups; the groups stay known, so that what follows is passed over."""
        for answers in self._groups.values():
            if self.num_bytes <= self.max_bytes:
                return
            if any(answer.packed for answer in answers):
                for answer in answers:
                    self._clear(answer, broken=True)
                self.counters["partials_evicted"] += 1

    def _problem(self, answer: _Answer, told: Told, min_version: int, bounds: Bounds) -> str | None:
        held = answer.size
        if told.start != held:
            return f"told from token {told.start} on, and {held} are here"
        if told.finished not in (0, 1, 2):
            return f"{told.finished} says not how it ended"
        if told.token_ids.size and answer.finished:
            return "tokens after its end"
        total = held + told.token_ids.size
        if total > self.max_new_tokens:
            return f"{total} tokens (rollout.max_new_tokens {self.max_new_tokens})"
        if told.finished and not total:
            return "it has ended without a token"
        if not told.token_ids.size:
            return None
        problem = id_problem(told.token_ids, bounds.vocab_size) or logprob_problem(told.logprobs)
        return problem or _version_problem(told, answer.floor, min_version, bounds)


def _shape_problem(renew: Renew) -> str | None:
    if any(len(entry) != 5 or entry[3] < 0 for entry in renew.progress):
        return "an entry of progress is not [position, answer, tokens before, new tokens, 0 | 1 | 2]"
    total = sum(entry[3] for entry in renew.progress)
    for name in ("token_ids", "logprobs", "versions"):
        size = getattr(renew, name).size
        if size != total:
            return f"{name} has {size} entries for {total} tokens of progress"
    return None


def _version_problem(told: Told, floor: int, min_version: int, bounds: Bounds) -> str | None:
    oldest, newest = int(told.versions.min()), int(told.versions.max())
    if oldest < min_version:
        return f"a token of version {oldest}, this lease needs {min_version} or newer"
    if newest > bounds.newest_version:
        return f"a token of version {newest}, the newest is {bounds.newest_version}"
    if int(told.versions[0]) < floor or (np.diff(told.versions) < 0).any():
        return "a token of an older version than the one before"
    return None
