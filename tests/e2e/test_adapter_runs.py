"""Whole runs over other packages' environments: what they train, and what becomes of them when a process is lost.

The witnesses of the default suite are tests/rollout_server/environments/test_verifiers.py and test_openenv.py.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples import sort6 as quickstart
from learner.record.summary import summarize
from replay.journal.reader import JournalReader
from replay.messages import Group
from tests.support.runs import ROOT, Input, Run, Runs, processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("aiohttp", reason="the extras `agents` and `openenv` are not installed")

STEPS = 6
HERE = ROOT / "tests" / "rollout_server" / "environments"
EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None
SIZES = (
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "replay.journal_keep=all",
    "replay.async_lag=0",  # so that one policy has sampled what is trained, and its logprobs are comparable
    "learner.lr=1e-3",
    "environment.turn_timeout_s=30",
)
PLACES = "32"
SAID = "Play.\nGuess a number from 1 to 9."


@contextmanager
def served(*words: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of OpenEnv's protocol with room for all episodes, and its address."""
    command = [sys.executable, str(HERE / "openenv_stand_in.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def guessing(folder: Path, model: Path) -> Input:
    """The quick start's model, and rows whose seed hides a number."""
    folder.mkdir()
    (folder / "model").symlink_to(model / "model")
    for name, count, first in (("train.jsonl", 400, 0), ("eval.jsonl", 16, 1000)):
        rows = [{"prompt": "Play.", "answer": "", "seed": first + number} for number in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Input(folder)


def openenv(*urls: str) -> tuple[str, ...]:
    options = {"url": list(urls), "style": "text", "max_turn_tokens": 1, "wait_s": 10, "reset": {"graded": True}}
    prompt = ("data.max_prompt_tokens=40", "rollout.max_new_tokens=24", "environment.max_turns=3")
    return (
        f"environment.function={json.dumps({f'{EXAMPLES}/openenv_servers.py:rollout': options})}",
        *prompt,
        *SIZES,
    )


def trained(run: Run) -> list[Group]:
    """The groups of the journal that the learner has trained, once each."""
    groups = run.groups()
    assert groups and groups == list(dict.fromkeys(groups)), "a group was trained twice"
    found = {}
    reader = JournalReader(run.folder / "journal")
    for record in reader.records():
        if record.kind == "group":
            message = reader.read(record.location)
            assert isinstance(message, Group)
            found[message.pass_, message.index] = message
    return [found[group] for group in groups]


def pieces(group: Group) -> list[tuple[bool, str]]:
    """Per stretch of tokens behind the prompts: whether it is in the loss, and its text."""
    stretches: list[tuple[bool, str]] = []
    for trains, token in zip(group.loss_mask.tolist(), group.token_ids.tolist(), strict=True):
        letter = dict(enumerate(quickstart.SYMBOLS)).get(token, "")  # the vocabulary has more ids than symbols
        letter = {quickstart.EOS: "", quickstart.UNK: "\ufffd"}.get(token, letter)
        if stretches and stretches[-1][0] == bool(trains):
            stretches[-1] = (bool(trains), stretches[-1][1] + letter)
        else:
            stretches.append((bool(trains), letter))
    return stretches


def checked(run: Run) -> list[Group]:
    """What holds of every one of these runs; its trained groups."""
    steps, found = run.steps(), summarize(run.folder, None)
    assert len(steps) == STEPS and found["groups_trained_twice"] == 0 and found["digests_equal"], found
    worst = max(row["training/rollout_probs_diff_max"] for row in steps if row["training/loss_tokens"])
    assert worst < 0.02, "the learner's contexts are those of the engine"
    groups = trained(run)
    in_loss = sum(row["training/loss_tokens"] for row in steps)
    assert 0 < in_loss <= sum(int(group.loss_mask.sum()) for group in groups)
    told = sum(int((group.loss_mask == 0).sum()) for group in groups)
    assert told > 0 and all((group.logprobs[group.loss_mask == 0] == 0).all() for group in groups)
    rewards = [round(row["critic/score/mean"], 3) for row in steps]
    tokens = f"{in_loss:.0f} tokens trained, {told} of the environment not"
    print(f"{len(groups)} groups, {tokens}; probabilities differ by {worst:.1e} at most; rewards {rewards}")
    return groups


def environment_process(run: Run) -> int:
    """The one that runs episodes, below its supervisor."""
    server = json.loads((run.folder / "processes" / "rollout-0.json").read_text())["pid"]
    needle = f"rollout_server.tasks.environments.worker {server}"
    return max(pid for pid, command in processes() if needle in command)


@pytest.mark.skipif(not HAS_VERIFIERS, reason="the extra `verifiers` is not installed")
def test_an_environment_of_verifiers_is_trained_on_and_its_process_killed(
    tmp_path: Path, sort6: Input, zygote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model").symlink_to(sort6.folder / "model")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"taskset": {"id": "digit_tasks"}, "env": {"id": "two_tries"}, "seat": "solver"}
    settings = (
        f"environment.function={json.dumps({f'{EXAMPLES}/verifiers_tasks.py:rollout': options})}",
        "data.train=verifiers:digit_tasks?skip=16&rows=400",
        "data.eval=verifiers:digit_tasks?rows=16",
        f"model.chat_template={tmp_path}/plain.jinja",
        "data.max_prompt_tokens=24",
        "rollout.max_new_tokens=40",
        *SIZES,
    )
    runs = Runs(tmp_path, Input(tmp_path / "data"), zygote)
    run = runs(*settings, steps=STEPS)
    try:
        run.wait_for_step(2)
        os.kill(environment_process(run), signal.SIGKILL)
        assert run.wait(200) == 0, run.text()[-3000:]
        for group in checked(run):
            told = {text for trains, text in pieces(group) if not trains}
            assert any(text.endswith("\ufffdry again.") for text in told), told
        named = re.findall(r"environment_error: environment process 0 died: .*exit code -9", run.log("replay"))
        assert named, run.log("replay")[-3000:]
        print(named[0])
    finally:
        runs.close()


def test_a_killed_process_with_many_leases_is_one_error(tmp_path: Path, sort6: Input, zygote: Any) -> None:
    runs = Runs(tmp_path, sort6, zygote)
    environment = (f"environment.function={{{HERE}/functions.py:thinks: {{sleep_s: 1}}}}",)
    run = runs(*environment, *SIZES, "rollout.groups_per_step=16", steps=STEPS)
    try:
        run.wait_for_step(1)
        os.kill(environment_process(run), signal.SIGKILL)
        assert run.wait(200) == 0, run.text()[-3000:]
        assert len(trained(run)) == STEPS * 16
        named = re.findall(r"(\S+): environment process 0 died: .*exit code -9", run.log("replay"))
        print(named)
        assert named.count("environment_error") == 1 and "aborted" in named, run.log("replay")[-3000:]
    finally:
        runs.close()


def test_servers_of_openenv_are_trained_on_and_one_vanishes(tmp_path: Path, sort6: Input, zygote: Any) -> None:
    runs = Runs(tmp_path, guessing(tmp_path / "data", sort6.folder), zygote)
    with served(PLACES) as (_, first), served(PLACES) as (vanishing, second):
        run = runs(*openenv(second, first), "reward.max_error_rate=1", steps=STEPS)
        try:
            run.wait_for_step(2)
            vanishing.kill()
            assert run.wait(200) == 0, run.text()[-3000:]
            for group in checked(run):
                told = "".join(text for trains, text in pieces(group) if not trains)
                assert set(told.replace("\ufffd", " ").split()) <= {"higher", "lower"}, told
            log = run.log("rollout-0")
            (line,) = set(re.findall(rf"openenv: {second}: no session .*", log))
            assert f"its episodes are played at {first}" in line, line
            print(line)
        finally:
            runs.close()


def test_the_only_server_of_openenv_vanishes(tmp_path: Path, sort6: Input, zygote: Any) -> None:
    runs = Runs(tmp_path, guessing(tmp_path / "data", sort6.folder), zygote)
    with served(PLACES) as (vanishing, url):
        run = runs(*openenv(url), steps=10_000)
        try:
            run.wait_for_step(2)
            vanishing.kill()
            began = time.monotonic()
            assert run.wait(60) == 1, run.text()[-3000:]
            line = run.text().splitlines()[-1]
            print(f"{time.monotonic() - began:.1f} s: {line}")
            assert time.monotonic() - began < 30, line
            assert f"{url}: no session" in line or f"{url}: the session ended at" in line
            assert "openenv_servers.py:rollout' failed for" in line and "reward.max_error_rate" in line
        finally:
            runs.close()
