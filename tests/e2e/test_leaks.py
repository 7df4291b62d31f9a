"""A leak that is planted in a process of each role of a real run is named, with its role. A cheap witness by default is
tests/slipstream/test_vitals.py."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLANT = """
import sys, threading, time

LEAKS = {
    "rollout_server.tasks.rewards.worker": "memory",
    "rollout_server.tasks.environments.worker": "descriptors",
    "multiprocessing.spawn import spawn_main": "memory",
    "rollout_server.main": "threads",
    "replay.main": "descriptors",
    "learner.main": "threads",
    "learner.train": "memory",
}


def leak(what):
    import os
    kept = []
    while len(kept) < 700:  # named long before, and no process at its limit
        time.sleep(0.05)
        if what == "memory":
            kept.append(b"x" * 300_000)
        elif what == "descriptors":
            kept.append(os.dup(2))
        else:
            kept.append(threading.Thread(target=time.sleep, args=(600,), daemon=True))
            kept[-1].start()


command = " ".join(sys.orig_argv)
what = next((what for text, what in LEAKS.items() if text in command), None)
if what is not None:
    threading.Thread(target=leak, args=(what,), daemon=True).start()
"""
EPISODE = """
async def rollout(row, client):
    await client.generate(row["prompt"])
"""
ROLES = {
    "replay": ("replay", r"replay 'replay' \(pid \d+\): descriptors grow"),
    "learner 0": ("learner-0", r"learner 'learner-0' \(pid \d+\): memory grows"),
    "learner 1": ("learner-1", r"learner 'learner-1' \(pid \d+\): memory grows"),
    "rollout server": ("rollout-0", r"rollout 'rollout-0' \(pid \d+\): threads grow"),
    "reward": ("rollout-0", r"reward processes of 'rollout-0' \(\d+, pid \d+ has most\): memory grows"),
    "environment": ("rollout-0", r"environment processes of 'rollout-0' \(\d+, pid \d+ has most\): descriptors grow"),
}
ENGINE = ("rollout-0", r"engine processes of 'rollout-0' \(\d+, pid \d+ has most\): memory grows")


@pytest.mark.parametrize("engine", ["torch", "sglang"])
def test_a_leak_in_each_role_is_named(tmp_path: Path, untrained, monkeypatch, engine):
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PLANT)
    (tmp_path / "episode.py").write_text(EPISODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    runs = Runs(tmp_path, untrained, None)
    wanted = dict(ROLES, **({"engine": ENGINE} if engine == "sglang" else {}))
    try:
        run = runs(
            f"environment.function={tmp_path}/episode.py:rollout",
            "environment.turn_timeout_s=30",
            "limits.growth_window_s=6",
            "limits.flat_reward_steps=0",
            "learner.lr=1e-6",
            f"rollout.engine={engine}",
            steps=100_000,
            split="1:2",
        )

        def all_named() -> bool:
            return all(re.search(f"leak: {text}", run.log(log)) for log, text in wanted.values())

        def all_shown() -> bool:
            return all(re.search(f"leak: {text}", run.text()) for _, text in wanted.values())

        run.wait_until(all_named, "a line for each leak", 240)
        run.wait_until(all_shown, "all of them in the terminal", 30)
        run.wait_until(lambda: "leak: launcher 'launcher'" in run.text(), "that of the launcher", 30)
        assert any(row.get("vitals/leaks", 0) > 0 for row in run.rows())
    finally:
        runs.close()
