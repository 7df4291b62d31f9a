"""Partial rollouts from server to server: a real engine, generator and server dies midway, another one goes on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config
from examples.random_qwen3 import SHAPES, make
from replay import messages as m
from replay.channel.frames import decode, encode
from replay.state.leases import Slot, SlotState
from replay.state.partials import Partials
from replay.state.validation import Bounds, problem_with
from rollout_server.engines import Completion, Partial
from rollout_server.progress import ProgressReports, prefixes_of
from rollout_server.server import RolloutServer
from scripts.bench.server import forced_length
from tests.rollout_server.small_generator import PROMPT, config_of, generating
from tests.rollout_server.torch_oracle import check_versions, load_model
from tests.rollout_server.torch_served import Gate, Gates, update
from tests.support.waiting import eventually

GROUP, CAP, STEP, SEED = 4, 30, 12, 11
GROUP_ID = (0, 3)
BOUNDS = Bounds(1, SHAPES["tiny"]["vocab_size"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Version 0 and version 1."""
    paths = [tmp_path_factory.mktemp("models") / f"tiny{seed}" for seed in range(2)]
    for seed, path in enumerate(paths):
        make("tiny", path, seed)
    return paths[0], paths[1]


class Wire:
    """Takes a dealer's place: what the server sends goes through the wire format and is kept."""

    run_id = "r1"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(decode(encode(message, "r1", len(self.sent)), m.TO_REPLAY).message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if type(message) is kind]

    def told(self) -> list[list[int]]:
        return [entry for renew in self.of(m.Renew) for entry in renew.progress]


@asynccontextmanager
async def server_of(config: Config, median: int = 0) -> AsyncIterator[tuple[RolloutServer, Wire]]:
    wire = Wire()
    async with generating(config, median) as generator:
        generator.task.stop_token_ids = ()
        yield RolloutServer(config, generator, wire, name="server", fingerprint={}), wire  # type: ignore[arg-type]


def lease(attempt: int, **prefix: Any) -> m.Lease:
    pass_, index = GROUP_ID
    made = m.Lease(
        pass_=pass_, index=index, attempt=attempt, min_version=0, lease_s=60.0, seed=SEED, prompt=PROMPT, **prefix
    )
    decoded = decode(encode(made, "r1", 1), m.FROM_REPLAY).message
    assert isinstance(decoded, m.Lease)
    return decoded


@asynccontextmanager
async def working(server: RolloutServer, given: m.Lease) -> AsyncIterator[asyncio.TaskGroup]:
    """The server works on a lease, and beats."""
    async with asyncio.TaskGroup() as tasks:
        await server.handle(given, tasks)
        beating = tasks.create_task(server.beat())
        yield tasks
        beating.cancel()


class Killed(Exception):
    """Ends a server with all that it does."""


async def pause_at(gate: Gate, server: RolloutServer, wire: Wire) -> None:
    """Pause the engine at the gate, until the server has told all that it has by then."""
    await gate.reached()
    pausing = await gate.posted(server.engine.pause("keep_kv"))
    gate.release()
    await pausing
    beats = len(wire.sent)
    await eventually(lambda: len(wire.sent) >= beats + 4, "beats")


async def told_before_it_died(config: Config, gate_at: Gates, median: int) -> Partials:
    """What replay knows of a group when its first server dies after STEP + 1 tokens of each answer."""
    partials = Partials(GROUP, CAP, Counter())
    slot = Slot(GROUP_ID, PROMPT, min_version=0, state=SlotState.LEASED, attempt=1)
    gate = gate_at(STEP)
    async with server_of(config, median) as (server, wire):
        with pytest.raises(ExceptionGroup) as ended:
            async with working(server, lease(1)):
                await pause_at(gate, server, wire)
                raise Killed
        assert ended.group_contains(Killed)
        for message in wire.of(m.Renew):
            assert partials.take(message, {0: slot}, BOUNDS) == []
    return partials


@pytest.mark.parametrize("median", [0, 12], ids=["one request", "one for each answer"])
async def test_a_second_server_goes_on_from_what_the_first_one_told(
    median: int, folders: tuple[Path, Path], gate_at: Gates
) -> None:
    config = config_of(folders[0], GROUP, CAP, partial_rollouts=True)
    models = [load_model(folder) for folder in folders]
    lengths = [CAP] * GROUP
    if median:
        lengths = [forced_length(SEED, i, median=median, sigma=0.7, limit=CAP) for i in range(GROUP)]
        assert min(lengths) < STEP < max(lengths), "some have ended when the server dies"
    partials = await told_before_it_died(config, gate_at, median)
    fields = partials.prefix(GROUP_ID, 0)
    begun = fields["prefix_lengths"].tolist()
    assert all(0 < told <= min(STEP + 1, length) for told, length in zip(begun, lengths, strict=True))
    ended = ["length" if told == length else "" for told, length in zip(begun, lengths, strict=True)]
    assert fields["prefix_finished"] == ended and len(set(ended)) == (2 if median else 1)
    async with server_of(config, median) as (server, wire):
        await update(server.engine, models[1], 1)
        async with working(server, lease(2, **fields)):
            await eventually(lambda: wire.of(m.Group), "the group")
        (group,) = wire.of(m.Group)
    check_group(group, config, models, lengths, fields)


def check_group(group: m.Group, config: Config, models: list[Any], lengths: list[int], fields: dict[str, Any]) -> None:
    """The group is acceptable, begins with what was told, and each logprob is that of the weights of its version."""
    slot = Slot(GROUP_ID, PROMPT, min_version=0, state=SlotState.LEASED, attempt=2)
    assert problem_with(group, slot, config, BOUNDS) is None
    assert group.lengths.tolist() == lengths
    parts = [np.split(a, np.cumsum(lengths)[:-1]) for a in (group.token_ids, group.logprobs, group.versions)]
    told = np.split(fields["prefix_token_ids"], np.cumsum(fields["prefix_lengths"])[:-1])
    for first, token_ids, logprobs, versions in zip(told, *parts, strict=True):
        before = len(first)
        answer = Completion(token_ids=token_ids, logprobs=logprobs, versions=versions, finish_reason="length")
        assert token_ids[:before].tolist() == first.tolist()
        assert versions.tolist() == [0] * before + [1] * (len(token_ids) - before)
        check_versions(dict(enumerate(models)), group.prompt_ids.tolist(), answer)
        with pytest.raises(AssertionError):
            check_versions(dict(enumerate(reversed(models))), group.prompt_ids.tolist(), answer)


async def test_answers_that_wait_for_their_rewards_are_told_whole(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has forgotten them by then."""
    partials, released = Partials(GROUP, CAP, Counter()), asyncio.Event()
    slot = Slot(GROUP_ID, PROMPT, min_version=0, state=SlotState.LEASED, attempt=1)
    async with server_of(config_of(folders[0], GROUP, CAP, partial_rollouts=True)) as (server, wire):
        score = server.generator.rewards.score

        async def slow(samples: Any) -> Any:
            await released.wait()
            return await score(samples)

        monkeypatch.setattr(server.generator.rewards, "score", slow)
        async with working(server, lease(1)):
            await eventually(lambda: sum(entry[4] > 0 for entry in wire.told()) == GROUP, "the ends of all")
            for message in wire.of(m.Renew):
                assert partials.take(message, {0: slot}, BOUNDS) == []
            released.set()
            await eventually(lambda: wire.of(m.Group), "the group")
        (group,) = wire.of(m.Group)
    fields = partials.prefix(GROUP_ID, 0)
    assert fields["prefix_finished"] == group.finish_reasons
    assert fields["prefix_token_ids"].tolist() == group.token_ids.tolist()
    assert server.generator.progress("0/3/1", [0] * GROUP)[0].token_ids.size == 0, "and forgotten here"


# ---- what a Renew says, without an engine -----------------------------------------------------------------


def test_nothing_is_told_where_the_key_is_off() -> None:
    source = Growing(1)
    source.grow("0", 0, 3, "")
    renew = ProgressReports(GROUP, partial_rollouts=False).renew([((0, 0, 1), "0")], {}, source)
    assert renew.leases == [[0, 0, 1, 0]] and not renew.progress and not renew.token_ids.size


def a_prefix(tokens: list[int], reason: str = "", version: int = 3) -> Partial:
    return Partial(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32) / 8,
        versions=np.full(len(tokens), version, np.int32),
        finish_reason=reason or None,  # type: ignore[arg-type]
    )


class Growing:
    """Stands for a generator: answers of several leases that grow when the test says so."""

    def __init__(self, leases: int) -> None:
        self.answers = {f"{i}": [a_prefix([]) for _ in range(GROUP)] for i in range(leases)}

    def grow(self, name: str, index: int, count: int, reason: str) -> None:
        answer = self.answers[name][index]
        if answer.finish_reason is None and count:
            tokens = answer.token_ids.tolist()
            self.answers[name][index] = a_prefix([*tokens, *range(len(tokens), len(tokens) + count)], reason)

    def progress(self, request_id: str, since: Sequence[int]) -> list[Partial]:
        return [answer.since(first) for answer, first in zip(self.answers[request_id], since, strict=True)]


GROWTH = st.lists(
    st.tuples(st.sampled_from("012"), st.integers(0, GROUP - 1), st.integers(0, 5), st.sampled_from(["", "", "stop"])),
    max_size=12,
)


@settings(max_examples=60)
@given(rounds=st.lists(GROWTH, max_size=6), most=st.integers(1, 9), restart_at=st.integers(0, 8))
def test_whatever_grows_replay_ends_up_with_it(
    rounds: list[list[tuple[str, int, int, str]]], most: int, restart_at: int
) -> None:
    """Through Renews of at most `most` tokens, and a restart of replay in between."""
    source, reports = Growing(3), ProgressReports(GROUP, partial_rollouts=True, max_tokens=most)
    partials, bounds = Partials(GROUP, 10**6, Counter()), Bounds(9, None)
    slots = {i: Slot((0, i), {}, min_version=0, attempt=1) for i in range(3)}
    keys = [((0, i, 1), f"{i}") for i in range(3)]
    number, silent = 0, 0
    while silent < 2:
        assert number < 500, "there is always something more to tell"
        for grown in rounds[number] if number < len(rounds) else []:
            source.grow(*grown)
        if number == restart_at:
            partials = Partials(GROUP, 10**6, Counter())
            reports.begin_again()
        renew = reports.renew(keys, {"1": 7}, source)
        assert renew.leases == [[0, 0, 1, 0], [0, 1, 1, 7], [0, 2, 1, 0]]
        assert renew.token_ids.size <= most
        assert partials.take(renew, slots, bounds) == []
        number += 1
        silent = silent + 1 if number > max(len(rounds), restart_at) and not renew.progress else 0
    for i in range(3):
        fields = partials.prefix((0, i), 0)
        held = source.answers[f"{i}"]
        if not fields:
            assert not any(answer.token_ids.size for answer in held)
            continue
        assert fields["prefix_finished"] == [answer.finish_reason or "" for answer in held]
        for name in ("token_ids", "logprobs", "versions"):
            assert fields[f"prefix_{name}"].tolist() == [x for a in held for x in getattr(a, name).tolist()]


def with_prefixes(min_version: int = 0, **changes: Any) -> m.Lease:
    fields: dict[str, Any] = {
        "prefix_finished": ["", "stop", "", ""],
        "prefix_lengths": np.array([2, 1, 0, 3], np.int32),
        "prefix_token_ids": np.arange(6, dtype=np.int32),
        "prefix_logprobs": np.zeros(6, np.float32),
        "prefix_versions": np.array([3, 3, 2, 3, 4, 4], np.int32),
    }
    return replace(lease(2, **{**fields, **changes}), min_version=min_version)


def test_a_prefix_that_is_too_old_for_the_lease_starts_anew_as_a_whole() -> None:
    for min_version, kept in ((3, [[0, 1], [], [], [3, 4, 5]]), (4, [[], [], [], []])):  # 3 is among its tokens
        found = prefixes_of(with_prefixes(min_version=min_version), GROUP) or []
        assert [(p.token_ids.tolist(), p.finish_reason) for p in found] == [(tokens, None) for tokens in kept]


@pytest.mark.parametrize(
    "broken",
    [
        {"prefix_lengths": np.array([2, 1, 3], np.int32)},
        {"prefix_finished": ["", "stop"]},
        {"prefix_lengths": np.array([2, 1, 0, 4], np.int32)},
        {"prefix_lengths": np.array([2, 1, -1, 4], np.int32)},
        {"prefix_versions": np.zeros(5, np.int32)},
        {"prefix_finished": ["", "stop", "", "abort"]},
    ],
)
def test_prefixes_that_do_not_fit_together_are_not_used_and_that_is_said(broken: Any, caplog: Any) -> None:
    assert prefixes_of(with_prefixes(**broken), GROUP) is None
    assert "lease (0, 3), attempt 2: its prefixes are not used" in caplog.text


def test_the_prefixes_of_a_lease_are_not_told_again() -> None:
    reports, source = ProgressReports(GROUP, partial_rollouts=True), Growing(1)
    given = with_prefixes(min_version=3)
    reports.leased(given)
    source.answers["0"] = prefixes_of(given, GROUP) or []
    key = ((0, 3, 2), "0")
    assert reports.renew([key], {}, source).progress == []
    for index in (0, 1):
        source.grow("0", index, 2, "")
    assert reports.renew([key], {}, source).progress == [[0, 0, 2, 2, 0], [0, 1, 0, 2, 0]]
    assert reports.renew([], {}, source).leases == []
    assert len(reports.renew([key], {}, source).progress) == 3, "a lease that was gone is told from the start"


def test_a_server_that_leaves_tells_all_in_as_many_messages_as_it_takes_also_where_the_key_is_off() -> None:
    source, reports = Growing(2), ProgressReports(GROUP, partial_rollouts=False, max_tokens=4)
    for name, index, count, reason in (("0", 0, 5, ""), ("0", 2, 3, "stop"), ("1", 1, 6, "length")):
        source.grow(name, index, count, reason)
    renews = list(reports.rest([((0, i, 1), f"{i}") for i in range(2)], {}, source))
    assert [renew.token_ids.size for renew in renews] == [4, 4, 4, 2] and reports.told() == (3, 14)
    partials, slots = Partials(GROUP, CAP, Counter()), {i: Slot((0, i), {}, min_version=0, attempt=1) for i in range(2)}
    assert [problem for renew in renews for problem in partials.take(renew, slots, Bounds(9, None))] == []
    for i, (lengths, ended) in enumerate(
        (([5, 0, 3, 0], ["", "", "stop", ""]), ([0, 6, 0, 0], ["", "length", "", ""]))
    ):
        fields = partials.prefix((0, i), 0)
        assert (fields["prefix_lengths"].tolist(), fields["prefix_finished"]) == (lengths, ended)
