"""One configuration under several settings: which runs are made, and what is told of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError
from learner import sweep


def swept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    code = sweep.main()
    said = capsys.readouterr()
    return code, [*said.out.splitlines(), *said.err.splitlines()]


def test_all_combinations_are_made() -> None:
    assert sweep.combinations(["a.b=1,2", "c.d=x"]) == [("a.b=1", "c.d=x"), ("a.b=2", "c.d=x")]
    assert sweep.combinations([]) == [()]
    with pytest.raises(ConfigError, match=r"--vary 'a\.b=1,'"):
        sweep.combinations(["a.b=1,"])


def test_runs_that_have_ended_are_not_made_again_and_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[list[str]] = []

    def train(args: Any, overrides: list[str], name: str) -> dict[str, Any]:
        made.append([name, *overrides])
        if len(made) == 3:
            raise sweep.RunFailed("it was killed")
        numbers = {"accuracy": 0.1 * len(made), "mean_lag": 1.0, "mean_length": 7.0, "step_s": 0.2, "curve": []}
        return numbers | dict.fromkeys(sweep.COUNTERS, 0)

    monkeypatch.setattr(sweep, "train", train)
    words = ["--vary", "algorithm.loss=a,b", "--seeds", "0,1", "--set", "data.train=d{seed}", "--out", str(tmp_path)]
    assert swept(monkeypatch, capsys, *words)[0] == 1
    code, said = swept(monkeypatch, capsys, *words)
    assert code == 0 and [run[0] for run in made] == [
        f"algorithm.loss-{loss}-seed-{seed}" for loss, seed in (("a", 0), ("a", 1), ("b", 0), ("b", 0), ("b", 1))
    ]
    assert made[1][1:] == ["data.train=d1", "algorithm.loss=a", "run.seed=1"]
    assert said[2].startswith("| algorithm.loss=a | 2 | 0.100 | 0.15 |")
    assert list(json.loads(said[4])["runs"]) == [f"algorithm.loss={n} seed={s}" for n in "ab" for s in "01"]
    code, said = swept(monkeypatch, capsys, *words, "--steps", "3")
    assert code == 2 and "algorithm.loss=a seed=0 was run with" in said[-1]


@pytest.mark.slow
def test_two_losses_of_the_quick_start_beside_each_other(tmp_path: Path) -> None:
    data = tmp_path / "sort6-seed{seed}"
    words = ["--vary", "algorithm.loss=ppo_clip,policy_gradient", "--set", "algorithm.i_know_this_is_biased=true"]
    words += ["--seeds", "3", "--steps", "3", "--set", "evaluation.num_prompts=16", "--out", str(tmp_path / "runs")]
    for key, file in (("model.path", "model"), ("data.train", "train.jsonl"), ("data.eval", "eval.jsonl")):
        words += ["--set", f"{key}={data / file}"]
    command = [sys.executable, "-m", "learner.sweep", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert len(runs) == 2 and all(0 < numbers["mean_lag"] <= 1 for numbers in runs.values())
    assert [len(numbers["curve"]) for numbers in runs.values()] == [2, 2]
