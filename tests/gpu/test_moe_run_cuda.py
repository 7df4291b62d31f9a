"""A mixture of about 3B parameters, .6B of them active, is trained beside SGLang on one GPU.

`python -m pytest -s tests/gpu/test_moe_run_cuda.py` prints the speed of both sides.
"""

import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from examples.random_qwen3 import SHAPES, write_prompts
from learner.record.summary import summarize
from tests.gpu.test_whole_run_cuda import SGLANG
from tests.support.runs import ROOT, Run, environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
SHAPE, STEPS, RUN_S = "3B-A0.6B", 20, 400
ENGINE = f"{SGLANG[:-1]}, disable_prefill_cuda_graph: true, cuda_graph_max_bs_decode: 128}}"
"""What a run so short does not repay the capture of."""
SHOWN = (
    "timing_s/step", "timing_s/gradients", "perf/mfu", "perf/learner_tokens_per_s", "rollout/tokens_per_s",
    "weight_sync/seconds", "weight_sync/bytes", "moe/routing_overridden", "moe/max_violation", "moe/idle_experts",
    "training/rollout_logprobs_diff_mean",
)  # fmt: skip


def test_a_mixture_is_trained_beside_sglang_and_each_update_proven(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "examples.random_qwen3", SHAPE, str(tmp_path / "model")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    write_prompts(tmp_path / "train.jsonl", vocab=SHAPES[SHAPE]["vocab_size"], count=512, num_tokens=64, seed=0)
    given = {
        "run.dir": tmp_path,
        "run.name": "mixture",
        "model.path": tmp_path / "model",
        "data.train": tmp_path / "train.jsonl",
        "data.max_prompt_tokens": 64,
        "reward.function": f"{ROOT}/tests/support/rewards.py:spread",
        "rollout.engine": "sglang",
        "rollout.dtype": "bfloat16",
        "rollout.sglang": ENGINE,
        "replay.async_lag": 0,  # else the learner is ahead at times, and a version is superseded before it has come
        "rollout.groups_per_step": 16,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 256,
        "learner.lr": 1e-5,
        "learner.total_steps": 2 * STEPS,
        "placement.device": "cuda",
        "placement.split": "1:1",
        "placement.share_gpus": "true",
        "evaluation.every_steps": 0,
        "tracking.live": "plain",
        "tracking.plot": "false",
    }
    words = (word for key, value in given.items() for word in ("--set", f"{key}={value}"))
    output = tmp_path / "out"
    with output.open("wb") as file:
        command = [sys.executable, "-m", "learner.main", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment())
    run = Run(process, tmp_path / "mixture", output)

    def proven() -> list[bool]:
        return [row["weight_sync/digests_equal"] for row in run.rows() if "weight_sync/digests_equal" in row]

    try:
        run.wait_until(lambda: len(proven()) >= STEPS, "the last version's proof", RUN_S)
    finally:
        run.process.send_signal(signal.SIGINT)
        run.wait_until(lambda: "SIGINT received" in run.text(), "word of the signal", 20)
        run.process.send_signal(signal.SIGINT)  # without the checkpoint, of 37 GB
        ended = run.wait(60)
    steps = run.steps()
    for name in SHOWN:
        values = [row[name] for row in steps if row.get(name) is not None]
        print(f"{name}: {len(values)} values, median {median(values) if values else None}")
    assert ended == 130, run.text()[-5000:]
    found = summarize(run.folder, None)
    print(found)
    assert len(steps) >= STEPS and all(proven()), proven()
    assert found["groups_trained_twice"] == 0 and run.nothing_left()
