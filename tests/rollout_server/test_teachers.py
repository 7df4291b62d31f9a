"""Teachers are asked by rollout servers: real processes' parts over loopback, and every way in which none answers."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import Config
from examples.random_qwen3 import make
from replay import keys
from replay.channel import load_keys
from rollout_server import teacher as entry
from rollout_server.engines.base import Scored
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.teachers import NotScored, TeacherError, links, scores
from tests.rollout_server.teacher_rig import (
    ANSWERS,
    PROMPT,
    ROW,
    Fixed,
    ask,
    asking,
    config_of,
    expected,
    standing,
    teaching,
)
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Policy and teacher."""
    path = tmp_path_factory.mktemp("models")
    make("tiny", path / "policy", 0)
    make("tiny", path / "teacher", 1)
    yield path / "policy", path / "teacher"


def config(folders: tuple[Path, Path], k: int = 0, temperature: float = 0.7, **teacher: Any) -> Config:
    given = {"path": str(folders[1]), "timeout_s": 0.5, "wait_s": 1.5} | teacher
    return config_of(folders[0], k, temperature, big=given)


async def test_a_group_gets_what_its_teacher_gives_to_its_tokens_at_the_temperature(folders: tuple[Path, Path]) -> None:
    run = config(folders, 3, timeout_s=20.0, wait_s=60.0)
    teachers, wanted = asking(run), await expected(run, folders[1], 3)
    async with standing() as stand, teaching(run, "big", stand):
        teachers.links.listed(await stand.listed(1), "run")
        found = await ask(teachers)
        masked = [replace(one, loss_mask=np.array([1, 0, 1][: one.tokens.size], np.uint8)) for one in ANSWERS]
        in_loss = await ask(teachers, answers=masked)
        teachers.close()
    assert found["teachers"] == ["big@0", "big@0"]
    assert np.array_equal(found["teacher_logprobs"], wanted.logprobs) and found["teacher_logprobs"].dtype == np.float32
    assert np.array_equal(found["teacher_ids"], wanted.ids) and np.array_equal(found["teacher_top"], wanted.top)
    assert in_loss["teacher_logprobs"].tolist() == (wanted.logprobs * [1, 0, 1, 1, 0]).tolist()
    assert in_loss["teacher_top"].reshape(-1, 3)[[1, 4]].tolist() == [[0] * 3] * 2


async def test_what_a_teacher_is_asked_before_its_welcome_is_answered_after_it(folders: tuple[Path, Path]) -> None:
    run = config(folders, timeout_s=20.0, wait_s=20.0)
    teachers = asking(run)
    async with standing(late_s=0.5) as stand, teaching(run, "big", stand):
        teachers.links.listed(await stand.listed(1), "run")
        async with asyncio.timeout(10):
            assert (await ask(teachers))["teachers"] == ["big@0", "big@0"]
        teachers.close()


async def test_a_group_waits_for_a_teacher_that_is_started_again(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked of the one that is gone is asked of the next one as soon as replay lists it."""
    run = config(folders, wait_s=60, timeout_s=30)
    teachers = asking(run)
    async with standing() as stand:
        async with teaching(run, "big", stand) as first:
            teachers.links.listed(await stand.listed(1), "run")
            await asyncio.wait_for(ask(teachers), 20)
            hung = asyncio.Event()
            first.engine.score = lambda *_, **__: hung.wait()  # type: ignore[method-assign, assignment, return-value]
            waiting = asyncio.create_task(ask(teachers))
            await eventually(lambda: teachers.gauges()["teachers/waiting"], "a group that waits")
        stand.hellos.clear()
        async with teaching(run, "big", stand):
            teachers.links.listed(await stand.listed(1), "run")
            found = await asyncio.wait_for(waiting, 20)
        teachers.close()
    assert found["teachers"] == ["big@0"] * 2 and "is not there any more [closed]" in caplog.text


@pytest.mark.parametrize("on_error", ["wait", "leave_out"])
async def test_a_teacher_that_is_away_is_named_and_its_group_ends(folders: tuple[Path, Path], on_error: str) -> None:
    teachers = asking(config(folders, on_error=on_error, retries=1, timeout_s=0.1, wait_s=0.4))
    with pytest.raises(LeaseFailed if on_error == "leave_out" else TeacherError) as failed:
        await ask(teachers)
    teachers.close()
    key = "teachers.big.wait_s" if on_error == "wait" else "teacher_error: teacher 'big', 2 tries"
    assert key in str(failed.value) and "no process of it is there" in str(failed.value)


async def test_the_reason_is_that_of_the_last_try_with_an_end(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers = asking(config(folders, wait_s=0.4))
    answers = iter([NotScored("it is busy")])

    async def once(*_: object) -> Any:
        for problem in answers:
            raise problem
        await asyncio.Event().wait()

    monkeypatch.setattr(scores, "PAUSE_S", 0.01)
    monkeypatch.setattr(teachers, "_once", once)
    with pytest.raises(TeacherError, match="1 tries; the last: it is busy"):
        await ask(teachers)
    teachers.close()


async def test_two_processes_share_the_load_and_one_that_hangs_is_passed_over(folders: tuple[Path, Path]) -> None:
    run = config(folders, timeout_s=1.0, wait_s=60)
    teachers, hung = asking(run), asyncio.Event()
    async with standing() as stand, teaching(run, "big", stand) as one, teaching(run, "big", stand, 1) as other:
        teachers.links.listed(await stand.listed(2), "run")
        await asyncio.gather(*(ask(teachers) for _ in range(6)))
        assert min(one.scored_tokens, other.scored_tokens) > 0
        one.engine.score = lambda *_, **__: hung.wait()  # type: ignore[method-assign, assignment, return-value]
        found = await asyncio.gather(*(ask(teachers) for _ in range(4)))
        teachers.close()
    assert all(each["teachers"] == ["big@0"] * 2 for each in found)


REFUSALS = {
    "tokenizer": ({"_tokenizer": "0123"}, "its tokenizer is"),
    "temperature": ({"_config": 0.9}, "rollout.temperature is 0.7 here, and scores at 0.9 are asked for"),
    "version": ({"version": 5}, "and replay lists 5 ("),
    "digest": ({"digest": "f00d"}, "and replay lists 0 (f00d) [corrupt]"),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_what_would_be_scored_wrongly_is_refused_by_name(folders: tuple[Path, Path], what: str) -> None:
    run, (changes, says) = config(folders), REFUSALS[what]
    teachers = asking(run)
    async with standing() as stand, teaching(run, "big", stand):
        ((name, address, version, digest),) = await stand.listed(1)
        listed = [name, address, changes.get("version", version), changes.get("digest", digest)]
        teachers.links.listed([listed], "run")
        if what == "temperature":
            teachers._config = config(folders, temperature=0.9)
        teachers._tokenizer = changes.get("_tokenizer", teachers._tokenizer)
        with pytest.raises(TeacherError, match="teacher 'big' at tcp://") as failed:
            await ask(teachers)
        teachers.close()
    assert says in str(failed.value)


async def test_an_answer_of_another_version_than_listed_is_asked_for_again(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refresh met the request: no try of it is lost, and nothing is called corrupt."""
    monkeypatch.setattr(links, "LISTED_S", 20.0)
    teachers = asking(run := config(folders, on_error="leave_out", retries=0, timeout_s=30.0))
    async with standing() as stand, teaching(run, "big", stand):
        ((*place, version, digest),) = await stand.listed(1)
        teachers.links.listed([[*place, 5, digest]], "run")
        waiting = asyncio.create_task(ask(teachers))
        (link,) = teachers.links._links.values()
        await eventually(lambda: link.failures, "an answer of another version")
        teachers.links.listed([[*place, version, digest]], "run")
        assert (await waiting)["teachers"] == ["big@0"] * 2 and not caplog.records
        teachers.close()


async def test_a_folder_with_another_tokenizer_is_no_teacher(folders: tuple[Path, Path], tmp_path: Path) -> None:
    make("10M", tmp_path / "other", 0)
    with pytest.raises(TeacherError, match=r"teachers\.big\.path.*has the tokenizer"):
        await entry.run(config(folders, path=str(tmp_path / "other")), "big", "tcp://127.0.0.1:1", "teacher-big")


GOOD = Scored(
    version=0,
    logprobs=np.full(5, -1.0, np.float32),
    ids=np.zeros(10, np.int32),
    top=np.full(10, -2.0, np.float32),
)
WRONG = {
    "nan": (
        replace(GOOD, logprobs=np.array([-1, np.nan, -1, -1, -1], np.float32)),
        r"the logprob nan \(number 1 of 5\)",
    ),
    "above 0": (replace(GOOD, top=np.full(10, 0.5, np.float32)), "the logprob 0.5"),
    "too few": (replace(GOOD, logprobs=GOOD.logprobs[:4]), r"\(4, 10, 10\) logprobs.*not \(5, 10, 10\)"),
    "unknown id": (replace(GOOD, ids=np.full(10, 512, np.int32)), "ids 512 to 512, of a vocabulary of 512"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_scores_that_no_model_gives_are_refused(folders: tuple[Path, Path], what: str) -> None:
    scored, says = WRONG[what]
    run = config_of(folders[0], 2, self={"of": "policy", "context": "{prompt} {hint}", "wait_s": 0.2})
    teachers = asking(run, Fixed(scored))

    async def encode(row: dict[str, Any]) -> Any:
        return PROMPT

    with pytest.raises(TeacherError, match=says):
        await teachers.group(ROW, ANSWERS, [1, 1], encode)
    teachers._engine = Fixed(GOOD)  # type: ignore[assignment]
    assert (await teachers.group(ROW, ANSWERS, [1, 1], encode))["teachers"] == ["self@0"] * 2


async def test_with_keys_a_teacher_of_one_node_is_asked_from_others(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """It proves itself by a key that replay passes on, and admits whom replay admits, without the server's secret."""
    keys.make(tmp_path / "keys", ["node1", "node2"], force=False)
    keys.make(tmp_path / "strange", ["node1"], force=False)
    for node in ("node1", "node2"):
        keys.export(tmp_path / "keys", node, tmp_path / node)

    def at(node: str, wait_s: float = 60) -> Config:
        run = config(folders, wait_s=wait_s)
        return run.model_copy(update={"network": run.network.model_copy(update={"keys": str(tmp_path / node)})})

    async with standing(keys=str(tmp_path / "keys")) as stand, teaching(at("node1"), "big", stand):
        ((_, address, *_),) = listed = await stand.listed(1)
        assert str(address).endswith(f" {load_keys(tmp_path / 'node1').client_public.decode()}")
        for run in (at("node2"), at("keys"), at("strange", wait_s=1.0)):
            teachers = asking(run)
            teachers.links.listed(listed, "run")
            asked = asyncio.wait_for(ask(teachers), 30)
            if run.network.keys == str(tmp_path / "strange"):
                with pytest.raises(TeacherError, match="teacher 'big'"):
                    await asked
            else:
                assert (await asked)["teachers"] == ["big@0"] * 2
            teachers.close()
