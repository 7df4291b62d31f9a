"""What running answers have got so far, as their servers tell by Renew. No socket.

They do so at each beat with replay.partial_rollouts, and before they leave. When a lease comes back because its server
is gone, the next lease of the prompt brings these tokens as prefixes. Nothing here is journalled: after a restart of
replay the servers tell everything again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.messages import Renew
from replay.state.leases import GroupId, Slot
from replay.state.validation import Bounds, id_problem, logprob_problem

MAX_BYTES = 1024**3
TOKEN = np.dtype([("id", np.int32), ("logprob", np.float32), ("version", np.int32)])
TOKEN_BYTES = TOKEN.itemsize
ANSWER_BYTES = 512
"""The objects that hold an answer."""
FINISHED = ("", "stop", "length")
"""By the last number of a Renew.progress entry."""


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


class Partials:
    """The tokens of running answers, of at most `max_bytes`; the groups that began first are thrown away first."""

    def __init__(
        self, group_size: int, max_new_tokens: int, counters: Counter[str], max_bytes: int = MAX_BYTES
    ) -> None:
        """`counters` get `partials_refused`, of what cannot be; `partials_evicted`, groups thrown away for want of
        memory; `partials_too_old`, answers with a token older than the next lease allows; `partials_used` and
        `partial_tokens_used`, answers and tokens that leases were given."""
        self.group_size, self.max_new_tokens, self.max_bytes = group_size, max_new_tokens, max_bytes
        self.counters = counters
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
            self.counters["partials_refused"] += 1
            return [problem]
        problems, start = [], 0
        tokens = np.empty(renew.token_ids.size, TOKEN)
        tokens["id"], tokens["logprob"], tokens["version"] = renew.token_ids, renew.logprobs, renew.versions
        for position, answer, before, count, finished in renew.progress:
            told = tokens[start : start + count]
            start += count
            slot = held.get(position)
            if slot is not None and (problem := self._note(slot, answer, before, told, finished, bounds)):
                self.counters["partials_refused"] += 1
                problems.append(f"group {slot.group_id}, attempt {slot.attempt}: answer {answer}{problem}")
        return problems

    def _note(
        self, slot: Slot, number: int, start: int, told: NDArray[np.void], finished: int, bounds: Bounds
    ) -> str | None:
        """Take in what was told of one answer; what is wrong with it, or None. Then the answer is forgotten.

        `start` 0 begins the answer anew; else it is the number of tokens that are here already.
        """
        if not 0 <= number < self.group_size:
            return f" of {self.group_size}"
        answer = (self._groups.get(slot.group_id) or self._begin(slot.group_id))[number]
        if slot.attempt < answer.attempt:
            return f": attempt {slot.attempt} tells, and attempt {answer.attempt} has told before"
        if slot.attempt > answer.attempt:  # another server: it may be of an older version than the one before
            answer.attempt, answer.floor = slot.attempt, 0
        if start == 0:
            self._clear(answer, broken=False)
            answer.floor = 0
        if answer.broken:
            return None
        problem = self._problem(answer, start, told, finished, slot.min_version, bounds)
        if problem is not None:
            self._clear(answer, broken=True)
            return f": {problem}"
        answer.packed += told.tobytes()
        answer.finished = finished
        answer.floor = int(told["version"][-1]) if told.size else answer.floor
        self.num_bytes += told.nbytes
        self._make_room()
        return None

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

    def forget(self, group_id: GroupId) -> None:
        """The group is here, or its answers may be why its lease ended. Unknown ones are ignored."""
        answers = self._groups.pop(group_id, [])
        self.num_bytes -= sum(ANSWER_BYTES + len(answer.packed) for answer in answers)

    def forget_newer(self, version: int) -> None:
        """Forget answers with a token newer than `version`.

        For a learner that goes on from `version`: it makes the versions above anew, perhaps not the same.
        """
        for answers in self._groups.values():
            for answer in answers:
                if answer.packed and answer.tokens()["version"].max() > version:
                    self._clear(answer, broken=True)

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

    def _problem(
        self, answer: _Answer, start: int, told: NDArray[np.void], finished: int, min_version: int, bounds: Bounds
    ) -> str | None:
        total = answer.size + told.size
        if start != answer.size:
            return f"told from token {start} on, and {answer.size} are here"
        if finished not in (0, 1, 2):
            return f"{finished} says not how it ended"
        if told.size and answer.finished:
            return "tokens after its end"
        if total > self.max_new_tokens:
            return f"{total} tokens (rollout.max_new_tokens {self.max_new_tokens})"
        if finished and not total:
            return "it has ended without a token"
        if not told.size:
            return None
        problem = id_problem(told["id"], bounds.vocab_size) or logprob_problem(told["logprob"])
        return problem or _version_problem(told["version"], answer.floor, min_version, bounds)


def _shape_problem(renew: Renew) -> str | None:
    if any(len(entry) != 5 or entry[3] < 0 for entry in renew.progress):
        return "an entry of progress is not [position, answer, tokens before, new tokens, 0 | 1 | 2]"
    total = sum(entry[3] for entry in renew.progress)
    for name in ("token_ids", "logprobs", "versions"):
        size = getattr(renew, name).size
        if size != total:
            return f"{name} has {size} entries for {total} tokens of progress"
    return None


def _version_problem(versions: NDArray[np.int32], floor: int, min_version: int, bounds: Bounds) -> str | None:
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < min_version:
        return f"a token of version {oldest}, this lease needs {min_version} or newer"
    if newest > bounds.newest_version:
        return f"a token of version {newest}, the newest is {bounds.newest_version}"
    if int(versions[0]) < floor or (np.diff(versions) < 0).any():
        return "a token of an older version than the one before"
    return None
