"""Whole runs in which some answers and episodes fail: each goes to its end, and tells what it has left out.

The witnesses of the default suite are tests/replay/test_answers.py and tests/learner/test_evaluation.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.record.summary import summarize
from tests.support.runs import ROOT, Input, Run, Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500)]

REWARD = """
import json, zlib
LOST = {lost!r}

def reward(sample):
    if sample["prompt"] == LOST:
        raise KeyError("of this prompt")
    chance = zlib.crc32((sample["prompt"] + "|" + sample["completion"]).encode()) % 50
    if sample["prompt"] not in {evaluated!r} and chance == 0:
        raise ValueError("one answer of fifty")
    return float(sample["completion"].strip() == str(sample["ground_truth"]))
"""
AGENT = """
import random
from tests.e2e.sums_agent import main as whole

async def main(row, base_url, api_key):
    said = await whole(row, base_url, api_key)
    if random.random() < 0.03:
        raise ConnectionError("no such game server")
    return said
"""


def told(run: Run) -> dict[str, Any]:
    """What a run that has ended tells of its failed answers, printed for people."""
    lines = [line for line in run.text().splitlines() if "left out" in line or "answers scored" in line]
    summary = summarize(run.folder, None)
    print(*lines[-3:], json.dumps(summary.get("left_out")), sep="\n")
    return summary["left_out"]


def test_a_reward_that_raises_on_two_percent_and_for_one_prompt_of_an_evaluation(launch, untrained, tmp_path):
    rows = [json.loads(line) for line in (untrained.folder / "eval.jsonl").read_text().splitlines()[:64]]
    prompts = [row["prompt"] for row in rows]
    (tmp_path / "mine.py").write_text(REWARD.format(lost=prompts[5], evaluated=prompts))
    settings = ("evaluation.every_steps=6", "evaluation.num_prompts=64", "evaluation.sampled=false")
    run = launch(f"reward.function={tmp_path}/mine.py:reward", *settings, steps=12)
    assert run.wait(300) == 0, run.text()[-3000:]
    left_out = told(run)
    assert len(run.steps()) == 12
    answers = 12 * 16 * 8
    assert 0.005 * answers < left_out["answers/failed/reward_error"] == left_out["answers/left_out"] < 0.05 * answers
    assert {"answers/kept_length", "answers/left_out_length"} <= left_out.keys()
    text = run.text()
    assert text.count("63 of 64 answers scored, 1 reward_error: ") == 3 and "KeyError: 'of this prompt'" in text
    assert "left out" in text.splitlines()[-1] or "left out" in text


def test_an_agent_that_raises_in_three_percent_of_its_episodes(tmp_path: Path, zygote: Any) -> None:
    pytest.importorskip("openai", reason="the client package is not installed")
    made = [sys.executable, "-m", "examples.calculator", "--out", str(tmp_path / "calculator")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    (tmp_path / "agent.py").write_text(AGENT)
    options = {"function": f"{tmp_path}/agent.py:main", "models": ["gpt-4o-mini"]}
    agent = (f"environment.function={json.dumps({'agent': options})}", "data.max_prompt_tokens=8")
    sizes = ("rollout.groups_per_step=8", "rollout.group_size=16", "rollout.max_new_tokens=32")
    runs = Runs(tmp_path, Input(tmp_path / "calculator"), zygote)
    run = runs(*agent, *sizes, "environment.turn_timeout_s=50", steps=12)
    try:
        assert run.wait(400) == 0, run.text()[-3000:]
        left_out = told(run)
        assert len(run.steps()) == 12 and not left_out.get("buffer/dropped/poison")
        assert 0.01 * 1536 < left_out["answers/failed/environment_error"] < 0.06 * 1536
    finally:
        runs.close()
