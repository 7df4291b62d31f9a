"""What replay keeps of running answers: what it takes and refuses, what a lease gets of it, how much it holds."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.messages import Renew
from replay.state.leases import Slot
from replay.state.partials import ANSWER_BYTES, TOKEN_BYTES, Partials
from replay.state.validation import Bounds

N, MOST, VOCABULARY, NEWEST = 3, 10, 50, 7
BOUNDS = Bounds(NEWEST, VOCABULARY)
GROUP = (0, 4)


def told(answer: int, start: int, tokens: list[int], version: int = 3, finished: int = 0, **changes: Any) -> Renew:
    """Of the only lease of a message."""
    arrays: dict[str, Any] = {
        "token_ids": np.array(tokens, np.int32),
        "logprobs": -np.arange(start, start + len(tokens), dtype=np.float32) / 8,
        "versions": np.full(len(tokens), version, np.int32),
    }
    return Renew(leases=[], progress=[[0, answer, start, len(tokens), finished]], **arrays | changes)


def note(partials: Partials, piece: Renew, *, group: tuple[int, int] = GROUP, attempt: int = 1) -> str | None:
    found = partials.take(piece, {0: Slot(group, {}, min_version=2, attempt=attempt)}, BOUNDS)
    return found[0].partition(f"attempt {attempt}: ")[2] if found else None


def tokens(partials: Partials, group: tuple[int, int] = GROUP, min_version: int = 0) -> list[list[int]]:
    fields = partials.prefix(group, min_version)
    if not fields:
        return [[]] * N
    ends = np.cumsum(fields["prefix_lengths"])
    return [part.tolist() for part in np.split(fields["prefix_token_ids"], ends[:-1])]


def begun() -> Partials:
    """Answers 0 and 1 have three tokens each, answer 2 has none."""
    partials = Partials(N, MOST, Counter(), 10**6)
    assert note(partials, told(0, 0, [5, 6])) is None
    assert note(partials, told(1, 0, [8, 9, 10])) is None
    assert note(partials, told(0, 2, [7], version=4)) is None
    return partials


def test_what_is_told_adds_up_to_the_prefixes_of_the_next_lease() -> None:
    partials = begun()
    assert note(partials, told(1, 3, [], finished=1)) is None
    fields = partials.prefix(GROUP, 3)
    assert fields["prefix_finished"] == ["", "stop", ""]
    assert fields["prefix_lengths"].tolist() == [3, 3, 0]
    assert fields["prefix_token_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert fields["prefix_logprobs"].tolist() == [0, -0.125, -0.25, 0, -0.125, -0.25]
    assert fields["prefix_versions"].tolist() == [3, 3, 4, 3, 3, 3]
    assert [fields[f"prefix_{name}"].dtype for name in ("lengths", "token_ids", "versions")] == [np.int32] * 3
    assert fields["prefix_logprobs"].dtype == np.float32
    assert (partials.counters["partials_used"], partials.counters["partial_tokens_used"]) == (2, 6)
    assert partials.prefix((9, 9), 0) == {}


REFUSED: dict[str, tuple[Renew, str]] = {
    "gap": (told(0, 4, [1]), "told from token 4 on, and 3 are here"),
    "again": (told(0, 2, [1]), "told from token 2 on, and 3 are here"),
    "too long": (told(0, 3, [1] * 8), r"11 tokens \(rollout\.max_new_tokens 10\)"),
    "vocabulary": (told(0, 3, [1, 50]), "token id 50 of a vocabulary of 50"),
    "negative token": (told(0, 3, [-1, 2]), "token id -1"),
    "nan": (told(0, 3, [1], logprobs=np.array([np.nan], np.float32)), "a logprob that is not finite"),
    "infinite": (told(0, 3, [1], logprobs=np.array([-np.inf], np.float32)), "a logprob that is not finite"),
    "positive": (told(0, 3, [1], logprobs=np.array([0.1], np.float32)), r"a positive logprob \(0\.1\)"),
    "decreasing": (told(0, 3, [1, 2], versions=np.array([5, 4], np.int32)), "older version than the one before"),
    "older than what was told before": (told(0, 3, [1], version=3), "older version than the one before"),
    "below the lease": (told(0, 3, [1], version=1), "a token of version 1, this lease needs 2 or newer"),
    "not yet made": (told(0, 3, [1], version=8), "a token of version 8, the newest is 7"),
    "way to end": (told(0, 3, [1], version=4, finished=3), "3 says not how it ended"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_costs_the_answer_its_prefix_and_no_other(case: str) -> None:
    partials = begun()
    piece, said = REFUSED[case]
    problem = note(partials, piece)
    assert problem is not None and re.search(said, problem)
    assert tokens(partials) == [[], [8, 9, 10], []]
    assert note(partials, told(0, 3, [7], version=4)) is None, "said once; what follows is passed over"
    assert tokens(partials) == [[], [8, 9, 10], []] and partials.counters["partials_refused"] == 1
    assert note(partials, told(0, 0, [5, 6, 7, 11])) is None, "told from the start, it is taken again"
    assert tokens(partials)[0] == [5, 6, 7, 11]


def test_the_next_attempt_goes_on_or_begins_anew_and_the_one_before_is_not_heard_any_more() -> None:
    partials = begun()
    older = told(0, 3, [20], version=2)
    assert note(partials, older, attempt=2) is None, "another server may be a version behind"
    assert note(partials, told(1, 0, [30]), attempt=2) is None
    assert tokens(partials) == [[5, 6, 7, 20], [30], []]
    problem = note(partials, told(0, 4, [21]), attempt=1)
    assert problem == "answer 0: attempt 1 tells, and attempt 2 has told before"
    assert tokens(partials) == [[5, 6, 7, 20], [30], []]
    assert note(partials, told(0, 4, [21], version=5), attempt=2) is None
    assert note(partials, told(0, 5, [22], version=4), attempt=2) is not None, "within an attempt versions only grow"


def test_an_answer_with_a_token_that_is_too_old_starts_anew_as_a_whole() -> None:
    partials = begun()
    assert note(partials, told(2, 0, [40, 41], version=4)) is None
    assert tokens(partials, min_version=4) == [[], [], [40, 41]]
    assert partials.counters["partials_too_old"] == 2
    assert tokens(partials, min_version=0) == [[], [], [40, 41]], "it is forgotten"
    assert partials.prefix(GROUP, 5) == {}
    assert note(partials, told(0, 3, [1], version=4)) is None and tokens(partials) == [[], [], []]


def test_the_groups_that_began_first_are_thrown_away_first() -> None:
    room = 3 * ANSWER_BYTES * N + 10 * TOKEN_BYTES
    partials = Partials(N, MOST, Counter(), room)
    for index in range(3):
        assert note(partials, told(0, 0, [index] * 3), group=(0, index)) is None
    assert note(partials, told(1, 0, [9] * 2), group=(0, 0)) is None
    assert partials.counters["partials_evicted"] == 1
    held = [tokens(partials, (0, index)) for index in range(3)]
    assert held == [[[], [], []], [[1] * 3, [], []], [[2] * 3, [], []]]
    assert partials.num_bytes <= room
    assert note(partials, told(0, 3, [9]), group=(0, 0)) is None, "what follows is passed over, without a complaint"
    assert tokens(partials, (0, 0)) == [[], [], []]


OPERATIONS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, N - 1), st.integers(0, 4), st.integers(-1, 12), st.booleans()),
    max_size=60,
)


@given(OPERATIONS)
def test_memory_is_bounded_and_counted_right(operations: list[tuple[int, int, int, int, bool]]) -> None:
    groups = 6
    most = groups * N * ANSWER_BYTES + 20 * TOKEN_BYTES
    partials = Partials(N, MOST, Counter(), most)
    true: dict[tuple[int, int], list[int]] = {}
    for index, answer, count, start, forget in operations:
        group = (0, index)
        if forget:
            partials.forget(group)
        else:
            note(partials, told(answer, start, [1] * count), group=group)
        true = {g: [len(t) for t in tokens(partials, g)] for g in partials._groups}
        assert partials.num_bytes == sum(ANSWER_BYTES * N + TOKEN_BYTES * sum(counts) for counts in true.values())
        assert partials.num_bytes <= most
    for group in list(true):
        partials.forget(group)
    assert partials.num_bytes == 0


def renew(progress: list[list[int]], count: int, **changes: Any) -> Renew:
    fields: dict[str, Any] = {
        "leases": [[0, 4, 1, 9], [0, 5, 1, 9]],
        "progress": progress,
        "token_ids": np.arange(1, count + 1, dtype=np.int32),
        "logprobs": np.full(count, -0.5, np.float32),
        "versions": np.full(count, 3, np.int32),
    }
    return Renew(**{**fields, **changes})


def slots() -> dict[int, Slot]:
    return {0: Slot((0, 4), {}, min_version=2, attempt=1), 1: Slot((0, 5), {}, min_version=2, attempt=1)}


A, B, BOTH = (0, 4), (0, 5), {0, 1}
MESSAGES: dict[str, tuple[list[list[int]], int, set[int], list[str], list[list[int]], list[list[int]]]] = {
    "all": ([[1, 2, 0, 2, 0], [0, 0, 0, 1, 2], [1, 0, 0, 3, 1]], 6, BOTH, [], [[3], [], []], [[4, 5, 6], [], [1, 2]]),
    "not held": ([[0, 0, 0, 2, 0], [1, 0, 0, 1, 0], [7, 0, 0, 1, 0]], 4, {1}, [], [[], [], []], [[3], [], []]),
    "gap": (
        [[0, 0, 0, 2, 0], [0, 1, 5, 1, 0], [1, 0, 0, 1, 0]], 4, BOTH,
        ["group (0, 4), attempt 1: answer 1: told from token 5 on, and 0 are here"], [[1, 2], [], []], [[4], [], []],
    ),
    "no answer": (
        [[0, 3, 0, 1, 0], [1, -1, 0, 1, 0]], 2, BOTH,
        ["group (0, 4), attempt 1: answer 3 of 3", "group (0, 5), attempt 1: answer -1 of 3"], [[]] * 3, [[]] * 3,
    ),
}  # fmt: skip
"""By case: progress, how many tokens (1, 2, ...), which leases the sender holds; what is said and taken of A and B."""


@pytest.mark.parametrize("case", MESSAGES)
def test_a_message_is_taken_apart_by_lease_and_answer_and_problems_cost_no_other(case: str) -> None:
    progress, count, held, said, of_a, of_b = MESSAGES[case]
    partials = Partials(N, MOST, Counter())
    found = partials.take(renew(progress, count), {at: slot for at, slot in slots().items() if at in held}, BOUNDS)
    assert (found, tokens(partials, A), tokens(partials, B)) == (said, of_a, of_b)


MALFORMED: dict[str, tuple[Renew, str]] = {
    "short entry": (renew([[0, 0, 0, 2]], 2), "an entry of progress is not"),
    "negative count": (renew([[0, 0, 0, 3, 0], [0, 1, 0, -1, 0]], 2), "an entry of progress is not"),
    "too many tokens": (renew([[0, 0, 0, 2, 0]], 3), "token_ids has 3 entries for 2 tokens of progress"),
    "too few versions": (
        renew([[0, 0, 0, 2, 0]], 2, versions=np.array([3], np.int32)),
        "versions has 1 entries for 2 tokens of progress",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_message_that_does_not_fit_together_is_refused_whole(case: str) -> None:
    message, said = MALFORMED[case]
    partials = Partials(N, MOST, Counter())
    (problem,) = partials.take(message, slots(), BOUNDS)
    assert problem.startswith(said)
    assert (partials.num_bytes, partials.counters["partials_refused"]) == (0, 1)
