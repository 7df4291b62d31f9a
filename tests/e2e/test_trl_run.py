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

    def start(steps: int, *settings: str) -> Run:
        given = [word for setting in (f"run.dir={tmp_path}", *settings) for word in ("--set", setting)]
        data = ["--steps", str(steps), "--data", str(sort6.folder)]
        return runs.start(["examples.trl.sort6", *data, *given], tmp_path / "trl-sort6")

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
