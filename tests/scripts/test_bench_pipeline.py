"""`scripts.bench pipeline`: the model it makes, its phases, its failures, and one whole quick run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from configs import Config
from rollout_server.tasks import Task
from scripts.bench import model as random_model
from scripts.bench.core import p90, spread
from scripts.bench.model import EOS, SHAPES, layout, make, shards, write_prompts
from scripts.bench.model import config as config_of
from scripts.bench.pipeline import Case
from scripts.bench.pipeline import append as write
from scripts.bench.train import Plan

ROOT = Path(__file__).parents[2]
PARAMETERS = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "8B": 8_190_735_360}
KEYS = {
    *("eta", "t_rollout", "t_train", "t_step", "bus_over_raw", "sync_over_raw", "pause_ms_p99", "tokens_per_s"),
    *("mean_length", "max_lag", "digests_equal", "versions", "hardware", "memory", "rollout_idle", "learner_idle"),
    *("t_rollout_p90", "t_train_p90", "t_step_p90", "trained_tokens_per_s_per_learner_gpu", "pause_source", "raw_s"),
}


def bench(*arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.bench", "pipeline", "--device", "cpu", "--quick", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# ---- the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = layout(name)
    assert found == expected
    if name in PARAMETERS:
        assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_a_large_model_is_cut_into_shards_in_order() -> None:
    tensors = layout("8B")
    parts = list(shards(tensors))
    assert [name for part in parts for name in part] == list(tensors)
    assert len(parts) > 4 and all(parts)
    sizes = [sum(random_model.num_bytes(size) for size in part.values()) for part in parts]
    assert max(sizes) <= random_model.SHARD_BYTES


def test_a_folder_loads_whole_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "SHARD_BYTES", 100_000)
    assert make("tiny", tmp_path / "model", 0)
    assert not make("tiny", tmp_path / "model", 1), "what is there stays"
    assert make("tiny", tmp_path / "same", 0) and make("tiny", tmp_path / "other", 1)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    weights = {
        name: dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        for name in ("same", "other")
    }
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, weights["same"][name])
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert not torch.equal(tensor, weights["other"][name])
            assert abs(float(tensor.detach().float().std()) - 0.02) < 0.002
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "same"], "nothing is left beside"


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
    assert list(plan.measured("idle")) == [4, 5, 6] and list(plan.measured("full")) == [8, 9, 10, 11]
    stream = Plan(warmup=1, idle=2, full=0, train=0, quiet_s=1)
    assert stream.total_steps == 4 and list(stream.measured("full")) == []
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_cases_are_read_or_refused() -> None:
    assert Case.parse("0.6B@1:3") == Case("0.6B", 1, 3) and str(Case("8B", 2, 2)) == "8B@2:2"
    for wrong in ("0.6B", "0.6B@1", "7B@1:1", "0.6B@1:1:1"):
        with pytest.raises(ValueError, match="SHAPE@R:L"):
            Case.parse(wrong)


def test_numbers() -> None:
    assert p90([3.0]) == 3.0 and p90([float(i) for i in range(1, 11)]) == 9.0 and p90([1.0, 9.0]) == 9.0


def test_results_are_appended(tmp_path: Path) -> None:
    for eta in (0.5, 0.75):
        write(tmp_path / "results" / "out.json", {"eta": eta})
    assert json.loads((tmp_path / "results" / "out.json").read_text()) == [{"eta": 0.5}, {"eta": 0.75}]


# ---- the command ----------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_quick_run_on_the_cpu(tmp_path: Path) -> None:
    done = bench("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    assert KEYS - result.keys() == set()
    assert json.loads((tmp_path / "out.json").read_text()) == [result]
    assert lines[0].startswith("| config | eta |") and lines[2].startswith("| tiny@1:1 |")
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


@pytest.mark.e2e
def test_a_case_that_fails_is_named_and_the_next_one_is_tried(tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    done = bench("--configs", "tiny@1:1,tiny@1:999", "--limit-s", "0.5", "--work", work)
    assert done.returncode == 1
    first, second = json.loads(done.stdout.splitlines()[-1])["results"]
    assert first["config"] == "tiny@1:1" and "not done within --limit-s 0.5 s" in first["error"]
    assert second["config"] == "tiny@1:999" and "fewer than 999 learner ranks" in second["error"]
    assert "replay ready at" in done.stderr, "the last lines of the logs"
    left = [path for path in Path("/proc").iterdir() if path.name.isdigit() and work in command_of(path)]
    assert left == [], "all processes are ended"


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_what_cannot_be_used_is_refused_at_once() -> None:
    for arguments, words in ((("--configs", "9B@1:1"), "SHAPE@R:L"), (("--steps", "0"), "--steps")):
        done = bench(*arguments)
        assert done.returncode == 2 and words in done.stderr
