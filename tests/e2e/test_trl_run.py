"""TRL's own asynchronous trainer over real rollout servers and the weight bus, on a CPU, and what happens to it."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run, Runs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="the extra 'trl' is not installed"),
]
GROUPS = 32
"""Of a step of the example."""


@pytest.fixture
def example(tmp_path: Path, sort6: Any) -> Iterator[Any]:
    """Starts the example on the quick start's input; what is left of it is ended."""
    runs = Runs(tmp_path, sort6, None)

    def start(steps: int, *settings: str, fault: tuple[str, ...] = ()) -> Run:
        words = ["tests.e2e.trl_driver", *fault] if fault else ["examples.trl.sort6"]
        given = [word for setting in (f"run.dir={tmp_path}", *settings) for word in ("--set", setting)]
        data = ["--steps", str(steps), "--data", str(sort6.folder)]
        return runs.start([*words, *data, *given], tmp_path / "trl-sort6")

    yield start
    runs.close()


def report_of(run: Run) -> dict[str, Any]:
    (line,) = [line for line in run.text().splitlines() if line.startswith('{"steps"')]
    return dict(json.loads(line))


def is_whole(run: Run, steps: int) -> None:
    """Every step is of groups of its own, within the lag, and nothing of the run is left."""
    assert [line["step"] for line in run.ledger()] == list(range(1, steps + 1))
    assert len(set(run.groups())) == len(run.groups()) == steps * GROUPS
    assert {lag for row in run.steps() for lag in row["training/lag_histogram"]} <= {"0", "1"}
    assert run.nothing_left()


def test_ten_updates_prove_eleven_versions(example: Any) -> None:
    run = example(10)
    assert run.wait() == 0, run.text()[-3000:]
    report = report_of(run)
    assert (report["steps"], report["versions"], report["proven"], report["digests_equal"]) == (10, 11, 11, True)
    assert report["last_reward"] > report["first_reward"] + 0.1
    is_whole(run, 10)


def test_two_processes_of_trl_are_one_learner(tmp_path: Path, sort6: Any) -> None:
    runs = Runs(tmp_path, sort6, None)
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "examples.trl.sort6"]
    given = ["--steps", "4", "--data", str(sort6.folder), "--set", f"run.dir={tmp_path}"]
    try:
        run = runs.start([*ranks, *given], tmp_path / "trl-sort6")
        assert run.wait() == 0, run.text()[-3000:]
        assert (report_of(run)["proven"], report_of(run)["digests_equal"]) == (5, True)
        assert "'batch/samples_per_row': '32'" in run.text()  # half of a microbatch on each
        is_whole(run, 4)
    finally:
        runs.close()


def test_a_server_and_replay_that_are_killed_lose_nothing(example: Any) -> None:
    run = example(60)
    run.wait_for_step(5)
    run.kill("rollout_server.main")
    run.wait_for_step(20)
    run.kill("replay.main")
    assert run.wait() == 0, run.text()[-3000:]
    assert "rollout-0" in run.text() and "restart 1 of" in run.text() and "in place, from its journal" in run.text()
    is_whole(run, 60)


def test_a_flipped_bit_in_an_engine_is_found_and_healed(example: Any) -> None:
    run = example(6, fault=("live", "3"))
    assert run.wait() == 1, run.text()[-3000:]
    report = report_of(run)
    assert (report["steps"], report["versions"], report["digests_equal"]) == (6, 7, False)
    assert report["proven"] == 7  # the version was sent again
    assert "quarantined" in run.text()
    is_whole(run, 6)


def test_a_run_without_servers_fails_by_name(example: Any) -> None:
    run = example(6, "rollout.restarts=0", "rollout.wait_for_servers_s=20", fault=("die", "3"))
    assert run.wait() == 1
    assert "RolloutsFailed: " in run.text() and "no rollout server for 20 s" in run.text()
    assert "rollout-0 (pid " in run.text() and "killed by SIGKILL" in run.text()
    assert run.nothing_left()


def test_nothing_outlives_trl(example: Any) -> None:
    run = example(1000)
    run.wait_for_step(3)
    assert len(run.pids()) == 2  # replay and a rollout server
    run.process.kill()
    run.process.wait(10)
    assert run.nothing_left()
