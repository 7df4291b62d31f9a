"""The files of examples/own train as examples/README.md names them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Input, Runs
from tests.test_docs import FIRST_REWARD

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROW = re.compile(r"^\| \[own/(\w+)\.py\]\(own/\1\.py\) \| `([\w.]+)` \| `([^`]+)`", re.MULTILINE)
SHOWN = {name: (key, value) for name, key, value in ROW.findall((ROOT / "examples" / "README.md").read_text())}


def settings(*names: str) -> list[str]:
    return [f"{key}={value}" for key, value in map(SHOWN.__getitem__, names)]


def test_every_file_is_in_the_index() -> None:
    assert set(SHOWN) == {path.stem for path in (ROOT / "examples" / "own").glob("*.py")}


def test_variants_of_your_own_train_together(launch: Runs) -> None:
    chosen = settings("dataset", "reward", "loss", "advantage", "correction", "group_filter")
    run = launch(*chosen, "algorithm.proximal=current", "learner.minibatches=2", steps=2)
    assert run.wait() == 0, run.text()[-3000:]
    steps = run.steps()
    assert len(steps) == 2 and all(0 <= row["reward/in_place"] <= 1 for row in steps)
    assert all(row["actor/grad_norm"] > 0 for row in steps)


def test_the_reward_of_the_readme_trains(launch: Runs, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FIRST_REWARD)
    run = launch(f"reward.function={tmp_path}/reward.py:reward", steps=1)
    assert run.wait() == 0, run.text()[-3000:]
    assert 0 <= run.steps()[0]["reward/in_place"] <= 1


def test_an_environment_of_your_own_trains(launch: Runs) -> None:
    also = ("rollout.max_new_tokens=15", "environment.turn_timeout_s=30", "reward.function=environment")
    run = launch(*settings("environment"), *also, steps=2)
    assert run.wait() == 0, run.text()[-3000:]
    assert [1 < row["reward/tries"] <= 2 for row in run.steps()] == [True, True]


@pytest.mark.slow
def test_an_agent_of_your_own_trains(launch: Runs, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
    pytest.importorskip("openai", reason="the client package is not installed")
    made = [sys.executable, "-m", "examples.calculator", "--out", str(tmp_path / "calculator")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    sizes = ("data.max_prompt_tokens=8", "rollout.max_new_tokens=32", "rollout.groups_per_step=4")
    also = ("environment.turn_timeout_s=50", "environment.max_episodes=8")
    run = launch(*Input(tmp_path / "calculator").settings, *settings("agent"), *sizes, *also, steps=1)
    assert run.wait(300) == 0, run.text()[-3000:]
    (step,) = run.steps()
    assert step["reward/messages"] >= 1 and step["episode/turns"] >= 1
