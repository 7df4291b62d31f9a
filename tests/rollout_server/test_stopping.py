"""Stop strings over tokens of any length: where an answer ends, and what of it is trained."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.base import Completion, Partial
from rollout_server.tasks import stopping
from rollout_server.tasks.stopping import Stop, first_stop, shown_of, until_stopped, whole_tokens

PIECES = ("a", "b", "ab", "\n", "b\n", "\n\na", "é", "abab")


def decode(ids: object) -> str:
    return "".join(PIECES[number] for number in ids)  # type: ignore[attr-defined]


ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)
stops = st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=3)


@given(ids, stops)
def test_an_answer_ends_with_the_token_that_completes_the_first_string(ids: list[int], stops: list[str]) -> None:
    found, text = first_stop(decode, ids, stops), decode(ids)
    places = [text.find(stop) for stop in stops if stop in text]
    assert (found is None) == (not places)
    if found is not None:
        kept, before = decode(ids[: found.num_tokens]), decode(ids[: found.num_tokens - 1])
        assert any(stop in kept for stop in stops) and not any(stop in before for stop in stops)
        assert kept.startswith(found.text) and not any(stop in found.text for stop in stops)


@given(ids, st.integers(0, 40))
def test_a_text_ends_between_two_tokens_or_within_one(ids: list[int], size: int) -> None:
    text, ends = decode(ids)[:size], {decode(ids[:count]): count for count in range(len(ids) + 1)}
    assert whole_tokens(decode, ids, text) == ends.get(text)


@given(ids, stops)
def test_nothing_is_shown_that_a_stop_string_may_take_back(ids: list[int], stops: list[str]) -> None:
    found = first_stop(decode, ids, stops)
    for count in range((len(ids) if found is None else found.num_tokens - 1) + 1):
        shown = shown_of(decode(ids[:count]), stops)
        assert (decode(ids) if found is None else found.text).startswith(shown)


def test_the_token_that_holds_the_end_of_a_string_is_kept_whole() -> None:
    assert first_stop(decode, [0, 5, 1], ["\n"]) == Stop(2, "a")
    assert shown_of("ab\ufffd", ["bc"]) == "a"


@pytest.mark.parametrize("stops", [["END"], []])
def test_a_look_at_a_running_answer_reads_what_is_new(monkeypatch, stops):
    """And the end of an answer as often as its search by halves needs."""
    ids, counted, shown = list("é1→\n".encode() * 250 + b"END")[:2000], [0, 0], []

    class Growing:
        grown, aborted = 0, asyncio.Event()

        def progress(self, _, since):
            self.grown = min(self.grown + 4, len(ids))
            first = since[0] if since else 0
            counted[0] += self.grown - first
            self.aborted.set() if self.grown == len(ids) and not stops else None
            return [Partial(token_ids=np.array(ids[first : self.grown], np.int32))]

        def abort(self, _):
            self.aborted.set()

        async def generate(self):
            await self.aborted.wait()
            return [Completion(token_ids=np.array(ids, np.int32), finish_reason="abort")]

    def utf8(numbers):
        counted[1] += len(numbers)
        return bytes(numbers).decode(errors="replace")

    async def beside(work, *given):
        return work(*given)

    async def run():
        engine = Growing()
        return await until_stopped(
            engine, engine.generate(), "a", decode=utf8, beside=beside, stops=stops, told=shown.append
        )

    monkeypatch.setattr(stopping, "LOOK_S", 0)
    (answer,) = asyncio.run(run())
    text = bytes(ids).decode()
    assert all(text.startswith(one) for one in shown) and len(shown[-1]) >= len(text) - 4
    assert answer.finish_reason == ("stop" if stops else "abort")
    assert counted[0] == len(ids) and counted[1] < 40 * len(ids)  # quadratic: 220
