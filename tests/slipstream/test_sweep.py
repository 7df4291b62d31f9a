"""One configuration under several settings: which runs are made, and what is told of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError
from slipstream import sweep


def swept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    code = sweep.main()
    said = capsys.readouterr()
    return code, [*said.out.splitlines(), *said.err.splitlines()]


def test_all_combinations_are_made() -> None:
    both = {("a.b=1", "c.d=x"): ["a.b=1", "c.d=x"], ("a.b=2", "c.d=x"): ["a.b=2", "c.d=x"]}
    assert sweep.combinations(["a.b=1,2", "c.d=x"]) == both
    cases = [["mild", "c.d=x", "c.e=y"], ["wild", "c.d=z"], ["plain"]]
    together = {("a.b=1", "mild"): ["a.b=1", "c.d=x", "c.e=y"], ("a.b=1", "wild"): ["a.b=1", "c.d=z"]}
    together |= {("a.b=1", "plain"): ["a.b=1"]}
    assert sweep.combinations(["a.b=1"], cases) == together
    assert sweep.combinations([]) == {(): []}
    with pytest.raises(ConfigError, match=r"--case 'c\.d=x'"):
        sweep.combinations([], [["c.d=x"]])
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
        numbers = {
            "accuracy": 0.1 * len(made),
            "mean_lag": 1.0,
            "mean_length": 7.0,
            "step_s": 0.2,
            "curve": [(0, 0.1), (5, 0.3)],
        }
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
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert list(json.loads(said[4])["runs"]) == [f"algorithm.loss={n} seed={s}" for n in "ab" for s in "01"]
    code, said = swept(monkeypatch, capsys, *words, "--steps", "3")
    assert code == 2 and "algorithm.loss=a seed=0 was run with" in said[-1]


def test_a_panel_for_what_was_varied_first_and_a_curve_for_the_rest() -> None:
    runs = {
        f"lag={lag} {name} seed={seed}": {"curve": [(0, lag), (5, seed)]}
        for lag in (0, 1)
        for name in "ab"
        for seed in (0, 1)
    }
    found = sweep.panels(runs)
    assert {panel: list(curves) for panel, curves in found.items()} == {"lag=0": ["a", "b"], "lag=1": ["a", "b"]}
    assert sweep.mean_and_range(found["lag=1"]["a"]) == [(0, 1, 1, 1), (5, 0.5, 0, 1)]
    assert sweep.mean_and_range([[(0, 0.5), (5, 1.0)], [(0, 0.0)]]) == [(0, 0.25, 0.0, 0.5)]
    assert sweep.panels({"loss=a seed=0": {"curve": []}}) == {"": {"loss=a": [[]]}}
