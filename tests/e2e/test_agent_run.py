"""A whole run of an agent that only knows `openai`: 20 steps, and the reward rises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.record.summary import summarize
from tests.support.runs import ROOT, Input, Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]
pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
pytest.importorskip("openai", reason="the client package is not installed")

STEPS = 20


def test_an_agent_that_only_knows_openai_is_trained(tmp_path: Path, zygote: Any) -> None:
    made = [sys.executable, "-m", "examples.calculator", "--out", str(tmp_path / "calculator")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    options = {"function": f"{Path(__file__).with_name('sums_agent.py')}:main", "models": ["gpt-4o-mini"]}
    agent = (f"environment.function={json.dumps({'agent': options})}", "data.max_prompt_tokens=8")
    sizes = ("rollout.groups_per_step=32", "rollout.group_size=8", "rollout.max_new_tokens=32")
    evaluated = ("evaluation.every_steps=20", "evaluation.num_prompts=256")
    runs = Runs(tmp_path, Input(tmp_path / "calculator"), zygote)
    run = runs(*agent, *sizes, *evaluated, "learner.lr=5e-4", "environment.turn_timeout_s=50", steps=STEPS)
    try:
        assert run.wait(400) == 0, run.text()[-3000:]
        found, steps = summarize(run.folder, None), run.steps()
        rewards = [round(row["critic/score/mean"], 4) for row in steps]
        print(found, rewards, [round(row["reward/calls"], 3) for row in steps])
        assert len(steps) == STEPS and found["digests_equal"] and found["groups_trained_twice"] == 0, found
        assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.1, rewards
        assert found["greedy_after"] >= found["greedy_before"] + 0.15, found
    finally:
        runs.close()
