"""What an operator sees of a run with SGLang on one GPU: the doctor before it, an agent's steps, and their trace.

`python -m pytest tests/gpu/test_whole_run_cuda.py -s` needs one GPU and shows what it found.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.record.summary import summarize
from tests.support.runs import ROOT, Run, environment
from tests.support.traces import parsed, problems

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
STEPS, RUN_S = 8, 300
TRACED = range(3, 6)
LAG_0 = "training/rollout_logprobs_diff_lag0_mean"
BFLOAT16 = 0.05
"""Mean difference of logprobs between two implementations in bfloat16, of a model with logits of about 1."""
SGLANG = "{attention_backend: triton, sampling_backend: pytorch, grammar_backend: none, mem_fraction_static: 0.3}"
"""Backends that need none of FlashAttention's kernels."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of an agent that only knows `openai`."""
    folder = tmp_path_factory.mktemp("calculator")
    made = [sys.executable, "-m", "examples.calculator", "--out", str(folder / "data")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    agent = ROOT / "tests" / "e2e" / "sums_agent.py"
    given = {
        "run.dir": folder,
        "run.name": "agent",
        "model.path": folder / "data" / "model",
        "data.train": folder / "data" / "train.jsonl",
        "data.eval": folder / "data" / "eval.jsonl",
        "data.max_prompt_tokens": 8,
        "environment.function": json.dumps({"agent": {"function": f"{agent}:main", "models": ["gpt-4o-mini"]}}),
        "environment.turn_timeout_s": 50,
        "rollout.engine": "sglang",
        "rollout.dtype": "bfloat16",
        "rollout.sglang": SGLANG,
        "rollout.groups_per_step": 32,
        "rollout.max_new_tokens": 32,
        "learner.compile": "false",
        "learner.total_steps": STEPS,
        "placement.device": "cuda",
        "placement.split": "1:1",
        "placement.share_gpus": "true",
        "evaluation.every_steps": 0,
        "tracking.live": "plain",
        "tracking.plot": "false",
        "tracking.profile": f"{TRACED.start}:{TRACED.stop}",
    }
    return ["--config", "quickstart", *(word for key, value in given.items() for word in ("--set", f"{key}={value}"))]


@pytest.fixture(scope="module")
def run(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run, ended."""
    pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
    pytest.importorskip("openai", reason="the client package is not installed")
    output = tmp_path_factory.mktemp("output") / "out"
    with output.open("wb") as file:
        command = [sys.executable, "-m", "learner.main", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment())
    folder = Path(next(word.partition("=")[2] for word in words if word.startswith("run.dir="))) / "agent"
    run = Run(process, folder, output)
    assert run.wait(RUN_S) == 0, run.text()[-5000:]
    return run


def test_the_doctor_finds_a_gpu_that_can_run_it(words: list[str]) -> None:
    command = [sys.executable, "-m", "slipstream.launch.doctor", *words, "--backends", "nccl,gloo", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    found = json.loads(done.stdout)
    for finding in found["findings"]:
        print(finding["severity"], finding["code"], finding["what"], finding["mend"], sep=" | ")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [finding for finding in found["findings"] if finding["severity"] == "stop"]
    assert torch.cuda.get_device_name() in done.stdout


def test_an_agent_is_trained_with_sglang(run: Run) -> None:
    found, steps = summarize(run.folder, None), run.steps()
    print(found, [round(row["critic/score/mean"], 3) for row in steps])
    assert len(steps) == STEPS and found["digests_equal"] and found["groups_trained_twice"] == 0, found
    assert sum(row["reward/calls"] for row in steps) > 0, "episodes of two turns"
    (first, *_) = [row[LAG_0] for row in steps if LAG_0 in row]
    assert first < BFLOAT16
    assert run.nothing_left()


def test_its_trace_has_the_kernels_of_the_gpu_in_the_updates(run: Run) -> None:
    found = parsed(run.folder / "trace" / f"steps_{TRACED[0]}_{TRACED[-1]}.json.gz")
    lanes = sorted({lane for lane in found.lanes.values()})
    print(*lanes, sep="\n")
    assert {process for process, _ in lanes} >= {"learner-0", "replay", "rollout-0"}
    updates = [event for event in found.of("learner-0", "steps") if event["name"] == "update_actor"]
    assert len(updates) == len(TRACED)
    streams = [lane for process, lane in lanes if process == "learner-0" and "stream" in lane]
    kernels = max((found.of("learner-0", stream) for stream in streams), key=len)  # communication has its own
    limits = [(update["ts"] - 2000, update["ts"] + update["dur"] + 2000) for update in updates]
    inside = [event for event in kernels if any(begin < event["ts"] < end for begin, end in limits)]
    print(len(kernels), "kernels,", len(inside), "of them in updates")
    assert len(inside) > len(kernels) / 2 > 50
    spans = [event for event in found.spans if "stream" not in found.lanes[event["pid"], event["tid"]][1]]
    assert problems(spans) == [] and "longest bubble: " in run.text()
