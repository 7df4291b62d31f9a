"""Parts of the benchmarks: models and versions, options, phases, medians, and the probe of the rollout servers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import Config
from learner.learner import Learner
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.generate import Generator
from rollout_server.tasks import Task
from scripts.bench import link, model, pipeline, replay
from scripts.bench.core import CaseFailed, quantile, spread, table
from scripts.bench.load import Case
from scripts.bench.server import ForcedLengths, ProbedEngine, ProbedProcess, TokenGaps
from scripts.bench.train import BenchLearner, Plan

PARAMETERS = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "8B": 8_190_735_360}


# ---- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_name(name: str) -> None:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config(name))
    assert sum(parameter.numel() for parameter in made.parameters()) == PARAMETERS[name]


def test_a_folder_loads_whole_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SHARD", "100KB")
    assert model.make("tiny", tmp_path / "model", 0) and model.make("tiny", tmp_path / "other", 1)
    assert not model.make("tiny", tmp_path / "model", 1), "what is there stays"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    other = dict(model.read(tmp_path / "other"))
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
    model.make("tiny", folder, 0)
    model.write_prompts(data, vocab=512, count=20, num_tokens=37, seed=0)
    task = Task(Config.model_validate({"model": {"path": str(folder)}, "data": {"train": str(data)}}))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    encoded = [task.encode(row) for row in rows]
    assert {len(ids) for ids in encoded} == {37} and len(set(map(tuple, encoded))) == 20
    assert task.stop_token_ids == (model.EOS,)
    texts = [task.decode(ids) for ids in encoded]
    assert texts == [row["prompt"] for row in rows], "answers that differ read differently"
    rewards = {spread({"completion": text}) for text in texts}
    assert len(rewards) == 20 and all(0 <= reward < 1 for reward in rewards)


def test_the_versions_are_those_of_adam(tmp_path: Path) -> None:
    model.make("tiny", tmp_path / "model", 0)
    settings = {"count": 2, "device": torch.device("cpu"), "seed": 1}
    made = model.versions(tmp_path / "model", before=40, lr=1e-6, **settings)
    assert made[0].keys() == dict(model.read(tmp_path / "model")).keys()
    assert 0.002 < model.density(*made) < 0.02, "about one element in a hundred after forty steps (PULSE, 2602.03839)"
    assert model.density(*model.versions(tmp_path / "model", before=40, lr=1e-3, **settings)) > 0.5


# ---- options, phases, numbers ---------------------------------------------------------------------------


def test_pipeline_reads_or_refuses_cases_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    cases = pipeline.parse(["--configs", "0.6B@1:3,8B@2:2"])[1]
    assert cases == [pipeline.Case("0.6B", 1, 3), pipeline.Case("8B", 2, 2)]
    for option, wrong, words in (
        *(("--configs", wrong, "SHAPE@R:L") for wrong in ("0.6B", "0.6B@1", "7B@1:1", "0.6B@1:1:1")),
        ("--steps", "0", "--steps"),
    ):
        with pytest.raises(SystemExit) as refused:
            pipeline.parse([option, wrong])
        assert refused.value.code == 2 and words in capsys.readouterr().err


def test_replay_reads_or_refuses_options_at_once() -> None:
    for arguments in (["--seconds", "-1"], ["--checkpoint-every", "0"], ["--producers", "-3"], ["--fsync", "often"]):
        with pytest.raises(SystemExit):
            replay.parse(arguments)
    assert replay.parse(["--minutes", "10"])[0].seconds == 600
    assert replay.parse(["--producers", "7", "--no-curve"])[1] == [Case(producers=7, curve=False)]


def test_link_names_the_commands_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(link.NoLink, match="iproute2"), link.cable(100, tmp_path):
        pass


def test_every_step_has_one_phase_and_the_first_of_each_does_not_count(tmp_path: Path) -> None:
    plan = Plan(warmup=2, idle=3, full=4, quiet_s=1)
    assert plan.phases == ["warmup"] * 2 + ["idle"] * 4 + ["full"] * 5
    assert plan.measured("idle") == [4, 5, 6] and plan.measured("full") == [8, 9, 10, 11]
    stream = Plan(warmup=1, idle=2, full=0, quiet_s=1)
    assert stream.total_steps == 4 and stream.measured("full") == []
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_numbers() -> None:
    assert [quantile(found, 0.9) for found in ([3.0], range(1, 11), [1.0, 9.0], [])] == [3, 9, 9, 0]
    rows = [{"bytes": 100.0 if number % 2 else 3.0, "total_s": 1.0, "cpu_s": 0.1} for number in range(12)]
    assert link.summary(rows)["measured"] == [5, 5]
    with pytest.raises(CaseFailed, match="4 versions whole"):
        link.summary(rows[:-1])


def test_the_table_has_every_case() -> None:
    flow = {"case": "64 producers", "tokens_per_cpu_second": 5_500_000, "bytes_per_token_in": 17.125}
    held = {"case": "held", "memory_over_queued": 1.15, "rss_mib_by_quarter": [1.0, 2.0]}
    failed = {"case": "1000 producers", "error": "replay ended with code 1"}
    lines = table([flow, failed, held], "case").splitlines()
    assert lines[0] == "| case | 64 producers | held |"
    assert "| tokens_per_cpu_second | 5500000 | - |" in lines and "| bytes_per_token_in | 17.12 | - |" in lines
    assert "| rss_mib_by_quarter | - | 1, 2 |" in lines
    assert lines[-1] == "1000 producers: no result: replay ended with code 1"


# ---- the probe ------------------------------------------------------------------------------------------


def test_the_gap_over_an_update_stands_apart_from_the_others() -> None:
    gaps = TokenGaps()
    assert gaps.claim("a") and not gaps.claim("b") and gaps.is_probe("a")
    for at in (1.0, 1.01, 1.02, 1.03):
        gaps.token(at)
    gaps.resume()
    gaps.token(1.09)
    gaps.token(1.10)
    found = gaps.detail()
    assert found["token_gap_ms_p50"] == pytest.approx(10)
    assert found["pause_ms_p50"] == found["pause_ms_max"] == found["pause_ms_last"] == pytest.approx(50)
    assert found["pause_samples"] == 1


def test_an_update_between_two_probes_is_no_gap() -> None:
    gaps = TokenGaps()
    gaps.claim("a")
    gaps.token(1.0)
    gaps.release()
    gaps.resume()
    assert gaps.claim("b")
    gaps.token(5.0)
    gaps.token(5.01)
    assert gaps.detail()["pause_samples"] == 0 and gaps.detail()["token_gap_ms_p50"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (BenchLearner, {"update", "commit", "checkpoint_if_due", "finish", "wait_for_broadcast", "span"}),
        (ForcedLengths, {"sample", "abort", "running_tokens", "progress", "sampling"}),
        (ProbedProcess, {"sampling_parameters", "generate", "resume"}),
        (ProbedEngine, {"health"}),
    ],
)
def test_the_product_has_what_the_variants_replace_and_call(variant: type, names: set[str]) -> None:
    (base,) = variant.__bases__
    assert base in (Learner, Generator, SGLangProcess, SGLangEngine)
    assert names <= vars(base).keys(), "or the variant measures something else"
