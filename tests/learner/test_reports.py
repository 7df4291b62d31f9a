"""learner.record.lag and plots/summary.png on run folders written here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from configs import load
from configs.loading import dump
from examples import sort6
from learner.record import lag
from learner.record.metrics import MetricsError
from slipstream.view import check_export, plot

STEP: dict[str, Any] = {"step": 1, "time": 1000.0, "critic/score/mean": 0.4, "rollout/idle_ratio": 0.3}
STEP |= {"training/lag_histogram": {"0": 10, "1": 990}, "trainer/idle_ratio": 0.1}
NOTHING: dict[str, Any] = {"step": 3, "time": 1.0, "critic/score/mean": None, "training/lag_histogram": {}}
EVALUATION = {"version": 1, "time": 1000.0, "val-core/sort6/greedy": 0.5}


OF_SETS = [
    {"version": version, "set": name, f"val-core/{name}/{mode}": 0.5}
    for version in (0, 5)
    for name in ("aime", "gsm8k")
    for mode in ("greedy", "reward/mean@4", "reward/pass@1", "reward/pass@4")
]


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "rows",
    [
        [{**STEP, "step": step} for step in range(1, 81)] + [{**EVALUATION, "version": v} for v in range(0, 81, 5)],
        [{**STEP, "training/lag_histogram": {str(lag): 100 for lag in range(9)}}, {"step": 2}, NOTHING, *OF_SETS],
        [{**EVALUATION, "val-core/sort6/greedy": None}, {"version": 1, "final": True, "weight_sync/seconds": 0.1}],
    ],
)
def test_a_picture_is_drawn_of_every_run(tmp_path, capsys, rows):
    path = tmp_path / "plots" / "summary.png"
    assert plot.main([str(write(tmp_path, *rows))]) == 0 and capsys.readouterr().out.strip() == str(path)
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 1000
        extrema = image.convert("L").getextrema()
    assert extrema[0] < 128 < extrema[1], "the picture is blank"
    assert [p.name for p in path.parent.iterdir()] == ["summary.png"]


@pytest.mark.parametrize("text", [None, "", '{"version": 1, "final": true}\n'])
def test_a_run_without_numbers_is_an_error_with_a_way_out(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(MetricsError, match=r"metrics\.jsonl: (missing; name the folder|no step and no evaluation yet)"):
        plot.plot_run(tmp_path)
    assert plot.main([str(tmp_path)]) == 2


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
    small, large = (step({"0": 30}, tokens=n, largest=n * 1e-6, mean=n * 1e-8) for n in (10, 30))
    exact = write_run(tmp_path / "exact", 0, [small, step({"0": 10}), large])
    code, lines, errors = lag_report(late, exact)
    assert code == 0, errors
    first, second = json.loads(lines[-1])["runs"]
    unknown = {"logprob_diff_max": None, "logprob_diff_mean": None}
    counted = {"bound": 2, "histogram": {"0": 10, "1": 20, "2": 10}, "mean_lag": 1.0, "above_bound": 0}
    assert first == {"run": str(late), **counted, **unknown}
    assert second["histogram"] == {"0": 70} and second["mean_lag"] == 0
    assert second["logprob_diff_max"] == pytest.approx(3e-5)
    assert second["logprob_diff_mean"] == pytest.approx((10 * 1e-7 + 30 * 3e-7) / 40), "weighted by tokens"
    assert lines[0].split()[:4] == ["run", "bound", "mean", "lag"]
    assert "20 (50.0%)" in lines[1] and "1.000" in lines[1] and "3.00e-05" in lines[2]


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


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def test_an_export_of_a_chat_run_is_compared_by_what_its_template_renders(tmp_path: Path) -> None:
    """Its answers are those of the folder itself, from any directory; another text is different, and named."""
    (tmp_path / "model").mkdir()
    sort6.save_tokenizer(tmp_path / "model")
    sort6.save_model(sort6.build_model(0), tmp_path / "model")
    step = tmp_path / "checkpoints" / "step_2"
    shutil.copytree(tmp_path / "model", step / "hf")
    (step / "COMPLETE").write_text('{"files": {}}')
    settings = [f"model.path={tmp_path}/model", f"model.chat_template={json.dumps(CHAT)}", "data.eval=elsewhere.jsonl"]
    config = load("quickstart", settings)
    (tmp_path / "config.yaml").write_text(dump(config))
    exported, prompts = check_export.Exported(step / "hf", config), [[{"role": "user", "content": "312"}], "45="]
    tokens = [exported.encode(prompt) for prompt in prompts]
    assert tokens[0] == exported.encode("312=")
    answers = exported.continued(tokens, [config.evaluation_sets[0].max_new_tokens] * 2)
    rows = [
        {"index": index, "prompt": prompt, "text": exported.text(answer), "reward": 0.5}
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    (tmp_path / "evaluations").mkdir()
    file = tmp_path / "evaluations" / "version_2_greedy.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check_export.check(tmp_path) == {"step": 2, "prompts": 2, "ties": 0, "different": []}
    rows[1]["text"] = "9" if not rows[1]["text"].startswith("9") else "8"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (different,) = check_export.check(tmp_path)["different"]
    assert (different["index"], different["evaluation"]) == (1, rows[1]["text"]) and different["nats"] > 0.02
