"""learner.record.summary, plots/summary.png and check-export on run folders written here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from configs import load
from configs.loading import dump
from examples import sort6
from learner.record import summary
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


def differing(largest: float | None, mean: float | None) -> dict[str, float | None]:
    return {"training/rollout_logprobs_diff_max": largest, "training/rollout_logprobs_diff_mean": mean}


STEPS = [
    {"training/lag_histogram": {"0": 60, "1": 30}, "training/loss_tokens": 10} | differing(1e-5, 1e-7),
    {"training/lag_histogram": {"2": 7, "3": 3}, "training/loss_tokens": 30} | differing(3e-5, 3e-7),
]


@pytest.mark.parametrize(("bound", "above"), [(3, 0), (1, 10), (0, 40)])
def test_a_summary_counts_tokens_by_lag_and_fails_above_the_bound(tmp_path, capsys, monkeypatch, bound, above):
    (tmp_path / "config.yaml").write_text(dump(load("quickstart", [f"replay.async_lag={bound}"])))
    write(tmp_path, *({"step": step, **row} for step, row in enumerate(STEPS, start=1)))
    monkeypatch.setattr("sys.argv", ["summary", str(tmp_path)])
    assert summary.main() == bool(above)
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_by_lag"] == {"0": 60, "1": 30, "2": 7, "3": 3} and found["tokens_above_bound"] == above
    assert found["mean_lag"] == pytest.approx((30 + 14 + 9) / 100) and found["max_lag"] == 3
    if bound == 0:
        assert found["logprob_diff_max"] == 3e-5
        assert found["logprob_diff_mean"] == pytest.approx((10 * 1e-7 + 30 * 3e-7) / 40), "weighted by tokens"
    assert ("logprob_diff_max" in found) == (bound == 0), "else it holds what was learnt since"


def test_a_value_that_is_not_finite_never_reads_as_a_good_number():
    broken = STEPS[0] | differing(None, None)
    for rows in ([], [STEPS[0], broken]):
        assert summary.logprob_difference(rows) == {"logprob_diff_max": None, "logprob_diff_mean": None}


CHAT = "{{ (tools or [{}])[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}="


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
    assert tokens[0] == exported.encode("312=") == exported.encode([{"role": "user", "content": "2"}], [{"name": "31"}])
    stopping = config.model_copy(update={"rollout": config.rollout.model_copy(update={"stop": ["5"]})})
    assert check_export.Exported(step / "hf", stopping).text(exported.encode("4567")) == "4"
    answers = exported.continued(tokens, [config.evaluation_sets[0].max_new_tokens] * 2)
    rows = [
        {"index": index, "prompt": prompt, "text": exported.text(answer), "reward": 0.5}
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    (tmp_path / "evaluations").mkdir()
    file = tmp_path / "evaluations" / "version_2_greedy.jsonl"
    unasked = {"index": 2, "prompt": "4" * 999, "text": "", "reward": None, "error": "prompt_too_long"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, unasked]))
    left_out = {"prompt_too_long": 1}
    expected = {"step": 2, "prompts": 2, "left_out": left_out, "ties": 0, "different": []}
    assert check_export.check(tmp_path) == expected
    rows[1]["text"] = "9" if not rows[1]["text"].startswith("9") else "8"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exported._task._prefix = exported.encode("9")  # the tokenizer's bos
    assert exported.encode("45=") == exported.encode("945=")
    (different,) = check_export.check(tmp_path)["different"]
    assert (different["index"], different["evaluation"]) == (1, rows[1]["text"]) and different["nats"] > 0.02
