"""Book-keeping of the answers that one set of weights decodes. No torch.

Running answers are always rows 0..n-1; when one finishes, the last row moves into its place. All per-token work
is a few numpy operations over all rows; Python touches a single answer only when it starts and when it ends.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_server.engines.base import Completion, FinishReason, Partial, Routing, Sampling
from slipstream.families.experts import Experts

ADMIT_FRACTION = 8
NO_TOKEN = -1


@dataclass(slots=True, frozen=True, eq=False)
class Look:
    """Pictures of a prompt, as its first forward takes them."""

    features: Any
    """[k, hidden] tensor, in place of the embeddings of k tokens."""
    places: NDArray[np.int64]
    """[k] positions of these tokens in the prompt."""
    positions: NDArray[np.int64]
    """[3, prompt] rotary positions."""
    shift: int
    """Rotary position of a token after the prompt, less its place in the sequence."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`len(keys)` answers to one prompt; prefixes may have ended already."""

    request_id: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    keys: list[int]
    """Random stream of each answer."""
    future: "Future[list[Completion]]" = field(default_factory=Future)
    """Gets the completions, in order."""
    prefixes: Sequence[Partial]
    """What each answer has at its start."""
    done: dict[int, Completion] = field(default_factory=dict)
    look: Look | None = None
    """What it sees besides its tokens."""

    def __post_init__(self) -> None:
        for index, prefix in enumerate(self.prefixes):
            if prefix.finish_reason is not None:
                self.done[index] = prefix.as_completion(prefix.finish_reason)

    @property
    def complete(self) -> bool:
        """All answers have ended."""
        return len(self.done) == len(self.keys)

    def completions(self) -> list[Completion]:
        """Answers in the order of their index."""
        return [self.done[index] for index in range(len(self.keys))]


@dataclass(slots=True, frozen=True, eq=False)
class Answer:
    """Answer number `index` of a request."""

    request: Request
    index: int
    known: NDArray[np.int32]
    """Prompt and prefix; the prompt itself, not a copy, where there is no prefix."""


class RowTable:
    """State of running answers, one row each, and the queue of those that wait.

    `ids[r, :length[r]]` is prompt plus answer so far; the last of these tokens is not in the KV cache yet.
    """

    def __init__(self, *, max_running: int, max_context: int, experts: Experts | None = None) -> None:
        self.max_running = max_running
        self.routing: Routing | None = None
        """[rows, positions, layers, k] of a model with experts."""
        if experts is not None:
            self.routing = np.zeros((max_running, max_context, *experts.shape), dtype=experts.dtype)
        self.answers: list[Answer] = []
        self.waiting: deque[Answer] = deque()
        self.complete: list[Request] = []
        """Requests of which all answers have ended; for the caller to take."""
        self.ids = np.zeros((max_running, max_context), dtype=np.int32)
        self.logprobs = np.zeros((max_running, max_context), dtype=np.float32)
        self.versions = np.zeros((max_running, max_context), dtype=np.int32)
        self.length = np.zeros(max_running, dtype=np.int64)
        self.prompt_length = np.zeros(max_running, dtype=np.int64)
        self.end = np.zeros(max_running, dtype=np.int64)
        self.token = np.zeros(max_running, dtype=np.int64)
        self.temperature = np.ones(max_running, dtype=np.float32)
        self.greedy = np.zeros(max_running, dtype=np.bool_)
        self.key = np.zeros(max_running, dtype=np.uint64)
        self.shift = np.zeros(max_running, dtype=np.int64)
        """Of rotary positions, see Look."""
        self.stops = np.full((max_running, 1), NO_TOKEN, dtype=np.int64)
        self._index = np.arange(max_running)

    @property
    def running(self) -> int:
        """Rows in use."""
        return len(self.answers)

    def enqueue(self, request: Request) -> None:
        """Queue the answers of a request that are not done yet."""
        for index in range(len(request.keys)):
            if index not in request.done:
                prefix = request.prefixes[index].token_ids
                known = np.concatenate([request.prompt, prefix]) if prefix.size else request.prompt
                self.waiting.append(Answer(request, index, known))
        if request.complete:
            self.complete.append(request)

    def _end(self, answer: Answer, completion: Completion) -> None:
        answer.request.done[answer.index] = completion
        if answer.request.complete:
            self.complete.append(answer.request)

    def ready_to_admit(self) -> bool:
        """Whether something waits, and an eighth of the rows is free or nothing runs."""
        if not self.waiting:
            return False
        free = self.max_running - self.running
        return not self.answers or free >= max(1, self.max_running // ADMIT_FRACTION)

    def admit(self, max_prefill_tokens: int) -> tuple[list[NDArray[np.int32]], list[int]]:
        """Move waiting answers, first come first served, into free rows.

        Stops at the last free row, or before the padded prompts exceed `max_prefill_tokens` (one always goes in).
        Returns the prompts, each once, and the number of its prompt for each row that is new.
        """
        prompts: list[NDArray[np.int32]] = []
        prompt_of_row: list[int] = []
        longest = 0
        while self.waiting and self.running < self.max_running:
            known = self.waiting[0].known
            if not prompts or known is not prompts[-1]:
                longest = max(longest, len(known))
                if prompts and longest * (len(prompts) + 1) > max_prefill_tokens:
                    break
                prompts.append(known)
            self._start(self.waiting.popleft())
            prompt_of_row.append(len(prompts) - 1)
        return prompts, prompt_of_row

    def _start(self, answer: Answer) -> None:
        row, request, sampling = self.running, answer.request, answer.request.sampling
        start, stop = len(request.prompt), len(answer.known)
        prefix = request.prefixes[answer.index]
        self.answers.append(answer)
        self.ids[row, :stop] = answer.known
        self.logprobs[row, start:stop] = prefix.logprobs
        self.versions[row, start:stop] = prefix.versions
        self.prompt_length[row], self.length[row] = start, stop
        self.end[row] = start + sampling.max_new_tokens
        self.temperature[row] = sampling.temperature
        self.greedy[row] = sampling.greedy
        self.key[row] = request.keys[answer.index]
        self.shift[row] = 0 if request.look is None else request.look.shift
        extra = len(sampling.stop_token_ids) - self.stops.shape[1]
        if extra > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, extra)), constant_values=NO_TOKEN)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def record(self, start: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """Append a token to each of the rows from `start` on."""
        stop = start + len(tokens)
        row, at = self._index[start:stop], self.length[start:stop]
        self.ids[row, at] = tokens
        self.logprobs[row, at] = logprobs
        self.versions[row, at] = version
        self.token[start:stop] = tokens
        at += 1

    def ended(self) -> NDArray[np.int64]:
        """Rows whose last token ends them."""
        used = slice(self.running)
        return np.flatnonzero(self._stopped(used) | (self.length[used] >= self.end[used]))

    def _stopped(self, rows: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        stopped: NDArray[np.bool_] = (self.stops[rows] == self.token[rows, None]).any(axis=1)
        return stopped

    def remove(self, rows: NDArray[np.int64], *, aborted: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take answers out and close the gaps; which rows were moved, and where to."""
        starts, stops = self.prompt_length[rows].tolist(), self.length[rows].tolist()
        stopped = self._stopped(rows).tolist()
        for row, start, stop, at_stop in zip(rows.tolist(), starts, stops, stopped, strict=True):
            reason: FinishReason = "abort" if aborted else "stop" if at_stop else "length"
            answer = self._tokens(row, start, stop).as_completion(reason)
            if self.routing is not None:
                answer = replace(answer, routing=self.routing[row, : stop - 1].copy())
            self._end(self.answers[row], answer)
        n, left = self.running, self.running - len(rows)
        stays = np.ones(n, dtype=np.bool_)
        stays[rows] = False
        source, target = left + np.flatnonzero(stays[left:]), np.flatnonzero(~stays[:left])
        self._move(source, target)
        del self.answers[left:]
        return source, target

    def _move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        if not len(source):
            return
        columns = (self.length, self.prompt_length, self.end, self.token, self.temperature, self.greedy, self.key)
        for column in (*columns, self.shift, self.stops):
            column[target] = column[source]
        width = int(self.length[target].max())
        for table in (self.ids, self.logprobs, self.versions, *([] if self.routing is None else [self.routing])):
            table[target, :width] = table[source, :width]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.answers[new] = self.answers[old]

    def drop_waiting(self, request: Request | None = None) -> None:
        """End waiting answers (of one request, or all) as `abort`."""
        dropped = [answer for answer in self.waiting if request is None or answer.request is request]
        self.waiting = deque(a for a in self.waiting if request is not None and a.request is not request)
        for answer in dropped:
            self._end(answer, answer.request.prefixes[answer.index].as_completion("abort"))

    def rows_of(self, request: Request | None = None) -> NDArray[np.int64]:
        """Rows of one request, or all rows in use."""
        rows = [row for row, a in enumerate(self.answers) if request is None or a.request is request]
        return np.array(rows, dtype=np.int64)

    def progress(self, request: Request, since: Sequence[int]) -> list[Partial]:
        """What each answer of a request has, from its token number since[i] on."""
        rows = {answer.index: row for row, answer in enumerate(self.answers) if answer.request is request}
        found = []
        for index, first in enumerate(since):
            if index in rows:
                row = rows[index]
                found.append(self._tokens(row, int(self.prompt_length[row]) + first, int(self.length[row])))
            else:
                answer = request.done.get(index)
                found.append((Partial.of(answer) if answer is not None else request.prefixes[index]).since(first))
        return found

    def _tokens(self, row: int, start: int, stop: int) -> Partial:
        return Partial(
            token_ids=self.ids[row, start:stop].copy(),
            logprobs=self.logprobs[row, start:stop].copy(),
            versions=self.versions[row, start:stop].copy(),
        )

    def produced(self) -> Iterator[tuple[Request, int]]:
        """Running answers with the number of tokens they have."""
        counts = self.length[: self.running] - self.prompt_length[: self.running]
        return zip((answer.request for answer in self.answers), counts.tolist(), strict=True)
