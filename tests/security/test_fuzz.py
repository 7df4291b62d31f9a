"""The fuzzer in a few seconds, and that it finds what it looks for."""

import asyncio
import json
import logging
import random
from typing import Any
from unittest.mock import AsyncMock

import pytest

from replay import messages as m
from replay.channel.frames import encode
from tests.security.fuzz import __main__ as fuzz
from tests.security.fuzz import worker
from tests.security.fuzz.mutations import Mutator
from tests.security.fuzz.samples import Samples
from tests.security.fuzz.targets import ReplayTarget


@pytest.mark.parametrize("target", sorted(worker.TARGETS))
def test_mutated_messages_stop_nobody(target: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)  # every line must have a text
    attack = worker.Attack(target, 7)
    asyncio.run(attack.run(fuzz.QUICK_FRAMES))
    found = attack.result()
    assert found["unhandled"] == [] and found["rss_growth_bytes"] <= fuzz.CAP_BYTES
    assert found["frames"] >= fuzz.QUICK_FRAMES and found["resealed"] >= 0.5
    assert found["accepted"] > 0.05 * found["messages"], "hardly any message gets past the checks"


def test_the_command_attacks_in_processes_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--frames", "500", "--seed", "7", "--targets", "replay"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["crashes"], found["unhandled"]) == (0, 0) and found["frames"]["replay"] >= 500


def test_the_same_seed_makes_the_same_messages() -> None:
    def messages(seed: int) -> list[list[bytes]]:
        rng = random.Random(seed)
        samples, mutator = Samples(m.FROM_REPLAY, rng, dict), Mutator(rng)
        return [mutator.mutate([bytes(f) for f in encode(samples.any(), "r", n)]) for n in range(200)]

    assert messages(3) == messages(3) != messages(4)


def test_an_exception_of_a_reader_is_counted_and_the_attack_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayTarget, "drain", AsyncMock(side_effect=[None, None, KeyError("planted")] * 99))
    attack = worker.Attack("replay", 1)
    asyncio.run(attack.run(4000))
    found = attack.result()
    assert found["frames"] >= 4000 and len(found["unhandled"]) >= 2
    assert "KeyError('planted')" in found["unhandled"][0]["error"]


def test_a_process_that_dies_is_a_crash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fuzz.sys, "executable", "/bin/false")
    assert fuzz.main(["--frames", "10", "--targets", "replay"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["crashes"] == 1
