"""learner.report.lag on run folders written here: the table, the numbers, the bound, and folders that are none."""

import json

import pytest

from configs import load
from configs.loading import dump
from learner.report import lag


def write_run(folder, bound, steps, *, tail=""):
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(load("quickstart", [f"replay.async_lag={bound}"])))
    lines = [json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(steps, start=1)]
    lines.insert(1, json.dumps({"version": 0, "val-core/sort6/greedy": 0.25}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines) + tail)
    return folder


def step(histogram, *, tokens=0, largest=0.0, mean=0.0):
    row = {"training/lag_histogram": histogram, "training/loss_tokens": tokens}
    if tokens:
        row |= {"training/rollout_logprobs_diff_max": largest, "training/rollout_logprobs_diff_mean": mean}
    return row


@pytest.fixture
def lag_report(monkeypatch, capsys):
    """The command in this process: exit code, lines on stdout, and stderr."""

    def run(*folders):
        monkeypatch.setattr("sys.argv", ["lag", *map(str, folders)])
        code = lag.main()
        done = capsys.readouterr()
        return code, done.out.splitlines(), done.err

    return run


def test_tokens_by_lag_of_several_runs(tmp_path, lag_report):
    late = write_run(tmp_path / "late", 2, [step({"0": 10}), step({"1": 20, "2": 10})], tail='{"step": 3, "trai')
    exact = write_run(
        tmp_path / "exact",
        0,
        [
            step({"0": 30}, tokens=10, largest=2e-6, mean=1e-7),
            step({"0": 10}),
            step({"0": 30}, tokens=30, largest=1e-5, mean=5e-7),
        ],
    )
    code, lines, errors = lag_report(late, exact)
    assert code == 0, errors
    first, second = json.loads(lines[-1])["runs"]
    assert first == {
        "run": str(late),
        "bound": 2,
        "histogram": {"0": 10, "1": 20, "2": 10},
        "mean_lag": 1.0,
        "above_bound": 0,
        "logprob_diff_max": None,
        "logprob_diff_mean": None,
    }
    assert second["histogram"] == {"0": 70} and second["mean_lag"] == 0
    assert second["logprob_diff_max"] == 1e-5
    assert second["logprob_diff_mean"] == pytest.approx((10 * 1e-7 + 30 * 5e-7) / 40), "weighted by tokens"
    assert lines[0].split()[:4] == ["run", "bound", "mean", "lag"]
    assert "20 (50.0%)" in lines[1] and "1.000" in lines[1] and "1.00e-05" in lines[2]


def test_tokens_above_the_bound_are_counted_and_fail(tmp_path, lag_report):
    code, lines, _ = lag_report(write_run(tmp_path / "run", 1, [step({"0": 60, "1": 30}), step({"2": 7, "3": 3})]))
    [run] = json.loads(lines[-1])["runs"]
    assert code == 1 and run["above_bound"] == 10 and "10.00%" in lines[1]


def test_a_step_with_a_value_that_is_not_finite_never_reads_as_a_good_number(tmp_path, lag_report):
    rows = [step({"0": 5}, tokens=5, largest=1e-6, mean=1e-7), step({"0": 5}, tokens=5, largest=None, mean=None)]
    [run] = json.loads(lag_report(write_run(tmp_path / "run", 0, rows))[1][-1])["runs"]
    assert run["logprob_diff_max"] is None and run["logprob_diff_mean"] is None and run["not_finite"] == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is this the folder of a run"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl: missing"),
        (lambda run: (run / "metrics.jsonl").write_text('{"version": 0}\n'), "no step was trained yet"),
        (lambda run: (run / "metrics.jsonl").write_text('{"version"\n{}\n'), "line 1: '{\"version"),
    ],
)
def test_a_folder_that_is_no_run_is_named(tmp_path, lag_report, spoil, words):
    run = write_run(tmp_path / "run", 1, [step({"0": 1})])
    spoil(run)
    code, lines, errors = lag_report(run)
    assert code == 2 and not lines and str(run) in errors and words in errors
