"""Pictures on a GPU: SGLang's logprobs beside transformers', updates proven, and three steps of a whole run."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Config
from examples.pictures import IDS, main, save_model
from replay.data import load_rows
from rollout_server.engines.base import Partial, Sampling
from rollout_server.generate import shown
from rollout_server.tasks.task import Task
from slipstream.vision import VisionTower
from tests.gpu.test_sglang_cuda import Buckets, run, started, update
from tests.support.runs import ROOT, Run, environment
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
RUN_S = 300
BFLOAT16 = 0.05
"""Mean difference of logprobs between two implementations in bfloat16, of a model with logits of about 1."""
SGLANG = {"attention_backend": "triton", "mm_attention_backend": "triton_attn", "mem_fraction_static": 0.3}
"""Backends that need none of FlashAttention's kernels."""
LONG = 320
"""Tokens of an answer that an update meets midway."""
ODD = [IDS["<|image_pad|>"], IDS["<|vision_start|>"], IDS["<|image_pad|>"]]
"""A beginning of an answer that looks like pictures."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "data"
    assert main(["--out", str(folder)]) == 0
    return folder


def settings(folder: Path, model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 128},
            "rollout": {"engine": "sglang", "dtype": "bfloat16", "max_new_tokens": LONG, "sglang": SGLANG},
            "learner": {"compute_dtype": "bfloat16"},
            "placement": {"device": "cuda", "split": "1:1", "share_gpus": True},
        }
    )


def reference(folder: Path, prompt: Any, answer: Any) -> torch.Tensor:
    """Logprobs of the answer by transformers, with our tower's features."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    ids = torch.tensor([prompt.token_ids + answer.token_ids.tolist()], device="cuda")
    kinds = (ids == model.config.image_token_id).int()
    kinds[:, len(prompt.token_ids) :] = 0  # what is sampled is text
    with torch.no_grad():
        grids = torch.tensor(prompt.pictures.grids, device="cuda")
        positions, _ = model.model.get_rope_index(ids, kinds, grids)
        embedded = model.model.get_input_embeddings()(ids)
        tower = VisionTower(folder, torch.bfloat16, "cuda")
        patches = [frames * rows * columns for frames, rows, columns in prompt.pictures.grids]
        pixels = torch.split(torch.from_numpy(prompt.pictures.pixels), patches)
        embedded[kinds.bool()] = tower.features(pixels, prompt.pictures.grids)
        logits = model(inputs_embeds=embedded, position_ids=positions).logits[0, -answer.token_ids.size - 1 : -1]
    targets = ids[0, -answer.token_ids.size :, None]
    return logits.float().log_softmax(-1).gather(1, targets)[:, 0].cpu()


async def alike(pictures: Path, model: Path) -> dict[str, float]:
    """Mean difference of logprobs from transformers', by what became of the requests."""
    config, tensors, off = settings(pictures, model), decoder(model), {}
    task, buckets = Task(config), Buckets(tensors)
    prompts = [task.prompt(row) for row in list(load_rows(pictures / "train.jsonl"))[:4]]
    wanted = buckets.fill(tensors)
    async with started(config) as engine:

        async def ask(name: str, tokens: int, prefix: list[int] = []) -> set[int]:  # noqa: B006
            known, sampling = len(prefix), Sampling(max_new_tokens=tokens, stop_token_ids=())
            begun = Partial(
                token_ids=np.array(prefix, np.int32),
                logprobs=np.zeros(known, np.float32),
                versions=np.zeros(known, np.int32),
            )
            given = {"prefixes": [begun]} if prefix else {}
            calls = [
                engine.generate(p.token_ids, sampling, 1, request_id=f"{name}{i}", **given, **shown(p))
                for i, p in enumerate(prompts)
            ]
            answers = [answer for (answer,) in await asyncio.gather(*calls)]
            pairs = [(a.logprobs, reference(model, p, a).numpy()) for p, a in zip(prompts, answers, strict=True)]
            off[name] = float(np.mean([np.abs(found - right)[known:].mean() for found, right in pairs]))
            return {int(version) for answer in answers for version in answer.versions}

        assert await ask("first", 8) == {0}
        assert await engine.digest() == wanted, "of the decoder alone"
        running = asyncio.create_task(ask("interrupted", LONG))
        await eventually(lambda: sum(engine.running_tokens().values()) >= 16, "tokens")
        assert await update(engine, buckets, 1, "recompute_kv") == wanted
        assert await running == {0, 1}
        await ask("odd", 16, ODD)
    return off


@pytest.mark.parametrize(("family", "patch"), [("qwen2_vl", 4), ("qwen2_5_vl", 14)])
def test_sglang_sees_the_pictures_that_the_learner_sees(pictures: Path, family: str, patch: int) -> None:
    """Also after an update, over one, and where answers have sampled tokens of pictures."""
    save_model(pictures / family, 0, family, patch=patch)
    found: dict[str, float] = {}

    async def job() -> None:
        found.update(await alike(pictures, pictures / family))

    run(job)
    print(found)
    assert len(found) == 3 and max(found.values()) < BFLOAT16, found


def decoder(folder: Path) -> dict[str, torch.Tensor]:
    """What an update carries, as the engine holds it."""
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="pt") as opened:
        names = [name for name in opened.keys() if not name.startswith("visual.")]  # noqa: SIM118  # no mapping
        return {name: opened.get_tensor(name).bfloat16() for name in names}


def test_three_steps_with_sglang_on_one_gpu(pictures: Path, tmp_path: Path) -> None:
    words = ["--config", "pictures", "--steps", "3", "--name", "run"]
    given = {
        "model.path": pictures / "model",
        "data.train": pictures / "train.jsonl",
        "data.eval": pictures / "eval.jsonl",
        "run.dir": tmp_path,
        "reward.function": f"{ROOT}/tests/support/rewards.py:spread",  # an untrained model names no colour
        "rollout.engine": "sglang",
        "rollout.sglang": "{attention_backend: triton, mm_attention_backend: triton_attn, mem_fraction_static: 0.3}",
        "placement.device": "cuda",
        "placement.share_gpus": "true",
        "replay.async_lag": 0,
        "evaluation.every_steps": 0,
        "learner.compile": "false",
        "tracking.live": "plain",
        "tracking.plot": "false",
    }
    words += [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    with (tmp_path / "out").open("wb") as output:
        command = [sys.executable, "-m", "learner.main", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment())
    made = Run(process, tmp_path / "run", tmp_path / "out")
    assert made.wait(RUN_S) == 0, made.text()[-3000:]
    print(made.text()[-3000:])
    assert len(made.steps()) == 3
    means = [row["training/rollout_logprobs_diff_lag0_mean"] for row in made.steps() if row["training/loss_tokens"]]
    assert means and max(means) < BFLOAT16
