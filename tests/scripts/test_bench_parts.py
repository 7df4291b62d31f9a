"""Parts of the benchmarks: models, options, phases, the probe of rollout servers, the load on replay and its books."""

import json
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import Config
from configs.learner import LearnerSettings
from examples import random_qwen3
from learner.learner import Learner
from learner.rows import lay_out
from replay import messages as m
from replay.state.leases import Slot
from replay.state.validation import Bounds, problem_with
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.torch.weights import read_folder
from rollout_server.generate import Generator
from rollout_server.tasks.task import Task
from scripts.bench import bus, load, replay, slow_disk
from scripts.bench import learner as bench_learner
from scripts.bench.core import cost_of, spread, write_json
from scripts.bench.load import Case, prepare
from scripts.bench.server import ForcedLengths, ProbedEngine, ProbedProcess, TokenGaps
from scripts.bench.train import BenchLearner, Plan


def test_a_result_takes_the_place_of_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_json(tmp_path / "pipe", [1])
        assert read.result(10) == "[\n 1\n]\n" and (tmp_path / "pipe").is_fifo()
    write_json(tmp_path / "file", [1])
    write_json(tmp_path / "file", [2])
    assert json.loads((tmp_path / "file").read_text()) == [2] and len(list(tmp_path.iterdir())) == 2


def test_a_folder_loads_whole_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_qwen3, "SHARD", "100KB")
    assert random_qwen3.make("tiny", tmp_path / "model", 0) and not random_qwen3.make("tiny", tmp_path / "model", 1)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in loaded.named_parameters():
        std = float(tensor.detach().float().std())
        assert bool((tensor == 1).all()) if name.endswith("norm.weight") else abs(std - 0.02) < 0.002
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left beside"


def test_a_prompt_has_exactly_so_many_tokens(tmp_path: Path) -> None:
    folder, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    random_qwen3.make("tiny", folder, 0)
    random_qwen3.write_prompts(data, vocab=512, count=20, num_tokens=37, seed=0)
    task = Task(Config.model_validate({"model": {"path": str(folder)}, "data": {"train": str(data)}}))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    encoded = [task.encode(row) for row in rows]
    assert {len(ids) for ids in encoded} == {37} and len(set(map(tuple, encoded))) == 20
    assert task.stop_token_ids == (random_qwen3.EOS,)
    texts = [task.decode(ids) for ids in encoded]
    assert texts == [row["prompt"] for row in rows], "answers that differ read differently"
    rewards = {spread({"completion": text}) for text in texts}
    assert len(rewards) == 20 and all(0 <= reward < 1 for reward in rewards)


def test_the_versions_are_those_of_adam(tmp_path: Path) -> None:
    random_qwen3.make("tiny", tmp_path / "model", 0)
    settings = {"count": 2, "device": torch.device("cpu"), "seed": 1}
    made = bus.make_versions(tmp_path / "model", before=40, lr=1e-6, **settings)
    assert made[0].keys() == dict(read_folder(tmp_path / "model", tied=False, dtype=torch.float32)).keys()
    assert 0.002 < bus.density(*made) < 0.02, "about one element in a hundred after forty steps (PULSE, 2602.03839)"
    assert bus.density(*bus.make_versions(tmp_path / "model", before=40, lr=1e-3, **settings)) > 0.5


def test_every_step_has_one_phase_and_the_first_of_each_does_not_count() -> None:
    plan = Plan(warmup=2, idle=3, full=4, quiet_s=1)
    assert plan.phases == ["warmup"] * 2 + ["idle"] * 4 + ["full"] * 5
    assert plan.measured("idle") == [4, 5, 6] and plan.measured("full") == [8, 9, 10, 11]


def test_the_gap_over_an_update_stands_apart_from_the_others() -> None:
    gaps = TokenGaps()
    gaps.watch("a")
    for at in (1.0, 1.01, 1.02, 1.03):
        gaps.token(at)
    gaps.went_on(1.08)  # before the next token has come
    gaps.token(1.09)
    gaps.token(1.10)
    gaps.token(1.16)
    gaps.token(1.17)
    gaps.went_on(1.15)  # or after it
    found = gaps.detail()
    assert found["token_gap_ms_p50"] == pytest.approx(10)
    assert [found[f"pause_ms_{name}"] for name in ("p50", "max", "last")] == pytest.approx([50] * 3)
    assert found["pause_samples"] == 2


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (BenchLearner, {"update", "commit", "checkpoint_if_due", "finish", "wait_for_broadcast", "span"}),
        (ForcedLengths, {"sample", "abort", "running_tokens", "progress", "sampling"}),
        (ProbedProcess, {"sampling_parameters", "generate"}),
        (ProbedEngine, {"health", "resume"}),
    ],
)
def test_the_product_has_what_the_variants_replace_and_call(variant: type, names: set[str]) -> None:
    (base,) = variant.__bases__
    assert base in (Learner, Generator, SGLangProcess, SGLangEngine)
    assert names <= vars(base).keys(), "or the variant measures something else"


def test_groups_are_random_different_and_of_lognormal_lengths() -> None:
    pool = prepare(60)
    lengths = np.concatenate([prepared.arrays["lengths"] for prepared in pool])
    assert abs(float(np.median(lengths)) / load.MEDIAN - 1) < 0.2
    assert abs(float(np.log(lengths).std()) - load.SIGMA) < 0.1 and lengths.max() <= load.CAP
    for field in ("token_ids", "logprobs", "prompt_ids"):
        contents = {prepared.arrays[field].tobytes() for prepared in pool}
        assert len(contents) == len(pool)
        # ids below 151,936 fill 17.2 of 32 bits, logprobs about 26 of 32
        assert all(len(zlib.compress(content)) > 0.5 * len(content) for content in list(contents)[:6])
    assert prepare(4)[3].arrays["token_ids"].tobytes() == pool[3].arrays["token_ids"].tobytes(), "one load"


def test_groups_pass_replays_checks_and_have_versions_a_token(tmp_path: Path) -> None:
    config = load.config_of(replay.parse(["--work", str(tmp_path)])[0], Case(curve=False))
    for index, prepared in enumerate(prepare(12)):
        for min_version, version in ((0, 0), (3, 3), (3, 4)):
            ids = {"pass_": 0, "index": index, "attempt": 1}
            group = prepared.group(m.Lease(**ids, min_version=min_version, lease_s=60, seed=0, prompt={}), version)
            slot = Slot((0, index), {}, min_version, attempt=1)
            assert problem_with(group, slot, config, Bounds(version, load.VOCAB_SIZE)) is None
            assert set(np.unique(group.versions)) == {min_version, version}
            stale = Slot((0, index), {}, version + 1, attempt=1)
            assert "this lease needs" in (problem_with(group, stale, config, Bounds(version, load.VOCAB_SIZE)) or "")


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_cpu_seconds_of_all_threads_are_counted_and_told_apart() -> None:
    before = cost_of(os.getpid())
    burn(0.2)
    with_main = cost_of(os.getpid())
    rounding = 5 / os.sysconf("SC_CLK_TCK")  # user and system seconds of two readings, and what a reading itself takes
    assert 0.15 < with_main["main"] - before["main"] <= with_main["total"] - before["total"] + rounding
    with ThreadPoolExecutor(1) as threads:
        threads.submit(burn, 0.2).result()
    both = cost_of(os.getpid())
    assert both["total"] > with_main["total"] + 0.15, "a thread that has ended counts"
    assert both["main"] < with_main["main"] + 0.1, "but not as the main thread"


def test_flops_of_the_learner_are_those_of_tokens_that_are_computed() -> None:
    """Nobody is credited for a prompt that is computed once for eight answers."""
    model, lengths, prompt = random_qwen3.config("tiny"), np.arange(1, 9, dtype=np.int32), 64
    found = []
    for share in (False, True):
        settings = LearnerSettings(share_prefixes=share, max_tokens_per_microbatch=10_000)
        batch = bench_learner.batch_of(lengths, prompt, settings, 512)
        rows = lay_out(batch, np.ones(8, np.float32), np.ones(8, np.float32), share)
        found.append(bench_learner.flops(model, rows))
        assert sum(row.saved for row in rows) == 7 * prompt * share
    heads, keys, hidden = 4 * 16, 2 * 16, 64
    per_token = 2 * 2 * (2 * hidden * heads + 2 * hidden * keys + 3 * hidden * 192)
    total = prompt + lengths
    attention = 2 * 2 * 2 * heads * int((total * (total + 1) // 2).sum())
    assert found[0] == 3 * (per_token * int(total.sum()) + attention + 2 * hidden * 512 * int(lengths.sum()))
    assert found[0] - found[1] == 3 * 7 * (per_token * prompt + 2 * 2 * 2 * heads * prompt * (prompt + 1) // 2)


@pytest.mark.parametrize(("heats", "ranks", "least"), [("auto", 1, 8), ("sft,plain", 3, 3), ("sft", 1, 1)])
def test_too_few_trajectories_for_a_group_are_refused_with_how_many_are_enough(
    heats: str, ranks: int, least: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_learner, "output_of", lambda *_: '{"heat": 1}')
    monkeypatch.setattr(bench_learner, "line", str)
    words = ["--heats", heats, "--ranks", str(ranks), "--trajectories"]
    with pytest.raises(SystemExit):
        bench_learner.command([*words, str(least - 1)])
    assert f"--trajectories {least - 1}: " in (said := capsys.readouterr().err) and f"give {least} or more" in said
    assert bench_learner.command([*words, str(least)]) == 0


def test_times_on_a_slow_disk_are_held_against_those_between_them() -> None:
    length = slow_disk.PHASE_S
    times = load.no_times() | {"batch": [(0.5, 0.1), (0.6, 0.1), (length + 0.5, 0.2), (2 * length, 0.1)]}
    found = replay.times_of(times)
    assert (found["batch_ms"], found["batch_ms_slow_p50"], found["batch_slow_over_fast"]) == (100.0, 200.0, 2.0)
    assert not [name for name in found if name.startswith(("status", "beat"))]
