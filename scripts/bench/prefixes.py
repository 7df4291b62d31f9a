"""`python -m scripts.bench prefixes`: gradients of answers that share their prompt, over those of prompts apart.

Both by turns in one process, so that a busy machine slows both down: CPU-seconds on a CPU, seconds on a GPU. Every
point is a batch of groups of 8, in one microbatch; the gradients of both are compared.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.broadcast import device_time
from scripts.bench.core import output_of, say, write_json
from scripts.bench.learner import GROUP, batch_of, flops

POINTS = "512:64,256:64,128:64,64:64,128:384,128:640,64:448"


def configuration(options: argparse.Namespace, folder: Path) -> Any:
    import torch

    from configs.loading import validate

    pairs = [tuple(map(int, point.split(":"))) for point in options.points.split(",")]
    tree = {
        "model": {"path": str(folder)},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": max(prompt for prompt, _ in pairs)},
        "rollout": {"max_new_tokens": max(answer for _, answer in pairs), "group_size": GROUP},
        "learner": {"max_tokens_per_microbatch": 1 << 30, "recompute": "none"},
        "placement": {"device": "cuda" if torch.cuda.is_available() else "cpu", "split": "1:1"},
    }
    return validate(tree, "bench prefixes")


def measured(policy: Any, config: Any, prompt: int, answer: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both ways, and how far their gradients are apart."""
    import torch

    from learner.advantages import build_advantage
    from learner.objective import Objective
    from learner.step import accumulate_gradients
    from learner.trainer import prepare
    from replay.desks.sharing import sharers

    device, model = policy.device, policy.model.transformer.config
    now = (lambda: device_time(device)) if device.type == "cuda" else time.process_time
    ways = (False, True)
    works: dict[bool, Any] = {}
    seconds: dict[bool, list[float]] = {share: [] for share in ways}
    gradients: dict[bool, Any] = {}
    for share in ways:
        given = config.model_copy(update={"learner": config.learner.model_copy(update={"share_prefixes": share})})
        lengths = np.full(GROUP * options.groups, answer, np.int32)
        batch = batch_of(lengths, prompt, given.learner, policy.vocab_size)
        works[share] = prepare(batch, build_advantage(given.algorithm), given)
    for turn in range(options.repeats + 1):
        for share in ways:
            began = now()
            accumulate_gradients(
                policy, works[share].rows, Objective(config.algorithm),
                temperature=1.0, global_tokens=works[share].global_tokens,
            )  # fmt: skip
            seconds[share].append(now() - began)
            if turn == 0:
                gradients[share] = torch.cat([gradient.flatten() for gradient in policy.local_gradients()])
    apart, shared = (statistics.median(seconds[share][options.repeats > 0 :]) for share in ways)
    rows = [works[share].rows for share in ways]
    largest = float(gradients[False].abs().max())
    return {
        "prompt": prompt,
        "answer": answer,
        "group": GROUP,
        "tokens": [sum(row.input_ids.numel() for row in each) for each in rows],
        "flops_ratio": flops(model, rows[0]) / flops(model, rows[1]),
        "seconds": [apart, shared],
        "speedup": apart / shared,
        "auto_shares": bool(sharers("auto", prompt, np.full(GROUP, answer)).any()),
        "gradient_difference": float((gradients[False] - gradients[True]).abs().max()) / largest,
    }


def command(arguments: list[str]) -> int:
    """Measure all points; the last line is one object of JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench prefixes", description=__doc__)
    parser.add_argument("--shape", default="10M", help="a name of learner.examples.random_qwen3")
    parser.add_argument("--points", default=POINTS, help="prompt:answer in tokens, with commas")
    parser.add_argument("--groups", type=int, default=1, help="in a batch")
    parser.add_argument("--repeats", type=int, default=2, help="timed turns, after one that is not")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "bench-models")
    parser.add_argument("--out", type=Path, help="JSON of all points")
    options = parser.parse_args(arguments)
    folder = options.models / options.shape
    output_of(
        f"the model of shape {options.shape}",
        ["-m", "learner.examples.random_qwen3", options.shape, str(folder)],
        300.0,
    )
    import torch

    from learner.policy.model import build_policy
    from learner.ranks import join_ranks

    config = configuration(options, folder)
    result: dict[str, Any] = {"shape": options.shape, "torch": torch.__version__, "points": []}
    with join_ranks(config) as ranks:
        on_gpu = ranks.device.type == "cuda"
        result["device"] = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} thread"
        policy = build_policy(config, ranks.mesh, ranks.device)
        for prompt, answer in (map(int, point.split(":")) for point in options.points.split(",")):
            point = measured(policy, config, prompt, answer, options)
            result["points"].append(point)
            ratios = f"{point['speedup']:.2f} x, by FLOPs {point['flops_ratio']:.2f} x"
            say(f"prompt {prompt}, answers {GROUP} x {answer}: {ratios}")
            if options.out:
                write_json(options.out, result)
    print(json.dumps({"prefixes": result}))
    return 0
