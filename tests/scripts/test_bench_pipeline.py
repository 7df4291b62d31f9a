"""`scripts.bench pipeline`: the model it makes, its phases, its failures, and one whole quick run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bench_lines import check
from transformers import AutoModelForCausalLM

from configs import Config
from rollout_server.tasks import Task
from scripts.bench import model as bench_model
from scripts.bench.core import p90, spread
from scripts.bench.model import EOS, make, write_prompts
from scripts.bench.model import config as model_config
from scripts.bench.pipeline import Case, append, parse
from scripts.bench.train import Plan
from scripts.chaos import processes

ROOT = Path(__file__).parents[2]
PARAMETERS = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "8B": 8_190_735_360}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "scripts.bench", "pipeline", "--device", "cpu", "--quick", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)


# ---- the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_name(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_a_folder_loads_whole_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "SHARD", "100KB")
    assert make("tiny", tmp_path / "model", 0) and make("tiny", tmp_path / "other", 1)
    assert not make("tiny", tmp_path / "model", 1), "what is there stays"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    other = dict(bench_model.read(tmp_path / "other"))
    for name, tensor in loaded.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert not torch.equal(tensor, other[name])
            assert abs(float(tensor.detach().float().std()) - 0.02) < 0.002
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"], "nothing is left beside"


def test_a_prompt_has_exactly_so_many_tokens(tmp_path: Path) -> None:
    folder, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    make("tiny", folder, 0)
    write_prompts(data, vocab=512, count=20, num_tokens=37, seed=0)
    task = Task(Config.model_validate({"model": {"path": str(folder)}, "data": {"train": str(data)}}))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    encoded = [task.encode(row) for row in rows]
    assert {len(ids) for ids in encoded} == {37} and len(set(map(tuple, encoded))) == 20
    assert task.stop_token_ids == (EOS,)
    texts = [task.decode(ids) for ids in encoded]
    assert texts == [row["prompt"] for row in rows], "answers that differ read differently"
    rewards = {spread({"completion": text}) for text in texts}
    assert len(rewards) == 20 and all(0 <= reward < 1 for reward in rewards)


# ---- phases and numbers ---------------------------------------------------------------------------------


def test_every_step_has_one_phase_and_the_first_of_each_does_not_count(tmp_path: Path) -> None:
    plan = Plan(warmup=2, idle=3, full=4, train=4, quiet_s=1)
    phases = [plan.phase(step) for step in range(1, plan.total_steps + 1)]
    assert phases == ["warmup"] * 2 + ["idle"] * 4 + ["full"] * 5
    assert plan.measured("idle") == [4, 5, 6] and plan.measured("full") == [8, 9, 10, 11]
    stream = Plan(warmup=1, idle=2, full=0, train=0, quiet_s=1)
    assert stream.total_steps == 4 and stream.measured("full") == []
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_numbers() -> None:
    assert p90([3.0]) == 3.0 and p90([float(i) for i in range(1, 11)]) == 9.0 and p90([1.0, 9.0]) == 9.0


def test_results_are_appended(tmp_path: Path) -> None:
    for eta in (0.5, 0.75):
        append(tmp_path / "results" / "out.json", {"eta": eta})
    assert json.loads((tmp_path / "results" / "out.json").read_text()) == [{"eta": 0.5}, {"eta": 0.75}]


# ---- the command ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.e2e
def test_a_quick_run_on_the_cpu(tmp_path: Path) -> None:
    done = bench("--stream", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    check("pipeline", result)
    assert json.loads((tmp_path / "out.json").read_text()) == [result]
    assert lines[0] == "| config | tiny@1:1 |" and lines[2].startswith("| eta | ")
    # Nothing here says that the machine was quiet: a busy one stretches any of the phases.
    assert 0 < result["eta"] < 2
    assert min(result["t_rollout"], result["t_train"], result["t_step"]) > 0
    assert result["digests_equal"] is True and result["syncs"] == 12
    assert result["max_lag"] <= 1
    assert result["updates_applied"] is True and result["engines_quiet"] is True
    assert result["bus_over_raw"] > 0 and result["sync_over_raw"] > result["bus_over_raw"]
    assert 16 < result["mean_length"] < 40 and result["longest"] <= 64
    assert result["pause_ms_p99"] > 0 and result["pause_source"]
    assert 0 <= result["learner_idle"] <= 1 and 0 <= result["rollout_idle"] <= 1
    assert result["hardware"] and result["versions"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in rows if "actor/grad_norm" in row]
    assert trained == [1, 2, *range(8, 13)], "the idle phase makes no update"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_that_fails_is_named_and_the_next_one_is_tried(tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    done = bench("--configs", "tiny@1:1,tiny@1:999", "--limit-s", "0.5", "--work", work)
    assert done.returncode == 1
    line = json.loads(done.stdout.splitlines()[-1])
    check("pipeline_failed", line)
    first, second = line["results"]
    assert first["config"] == "tiny@1:1" and "not done within --limit-s 0.5 s" in first["error"]
    assert second["config"] == "tiny@1:999" and "fewer than 999 learner ranks" in second["error"]
    assert "replay ready at" in done.stderr, "the last lines of the logs"
    assert [command for _, _, _, command in processes.table() if work in command] == [], "all processes are ended"


def test_cases_are_read_or_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--configs", "0.6B@1:3,8B@2:2"])[1] == [Case("0.6B", 1, 3), Case("8B", 2, 2)]
    for option, wrong, words in (
        *(("--configs", wrong, "SHAPE@R:L") for wrong in ("0.6B", "0.6B@1", "7B@1:1", "0.6B@1:1:1")),
        ("--steps", "0", "--steps"),
    ):
        with pytest.raises(SystemExit) as refused:
            parse([option, wrong])
        assert refused.value.code == 2 and words in capsys.readouterr().err
