"""`python -m scripts.bench learner`: one step of the learner, and the same step without the things that speed it up.

A batch of groups with lognormal answers and random weights; each heat is a process of its own, or with `--ranks` one a
device, each of which has as many trajectories as one device alone. MFU is by causal FLOPs at the lengths that there are
(products forward and twice that backward, attention, the output head at answer tokens), without credit for what is
computed again, or not at all because answers share their prompt; tokens are those of trajectories.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.broadcast import device_time
from scripts.bench.core import CaseFailed, output_of, say, write_json
from slipstream.families.sizes import Sizes
from slipstream.runtime.lifeline import PARENT, die_with_parent

GROUP = 8
SIGMA = 0.7
WARM_UP = 2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
HEATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, deterministic": {"deterministic": True},
    "compiled, none": {"compile": True, "recompute": "none"},
    "compiled, selective": {"compile": True, "recompute": "selective"},
    "compiled, full": {"compile": True, "recompute": "full"},
    "auto, shared": {"share_prefixes": True},
    "auto, apart": {"share_prefixes": False},
    "sft": {"objective": "sft"},
    "plain": {"compile": False, "recompute": "none"},
    "plain, selective": {"compile": False, "recompute": "selective"},
    "plain, full": {"compile": False, "recompute": "full"},
}
SIZES = {
    "ranks": (1, "one a device"),
    "trajectories": (64, "of a batch, for each rank"),
    "mean": (2048, "tokens of an answer"),
    "cap": (8192, "tokens of the longest answer"),
    "prompt": (256, "tokens of a prompt"),
    "max_tokens": (16_384, "of a microbatch"),
    "steps": (3, "timed updates"),
    "loss_tokens": (0, "of an answer that are in the loss, its last ones; 0: all. One leaves the output head out"),
}


@dataclass(frozen=True)
class Task:
    """One heat, as its process reads it."""

    shape: str
    heat: str
    mesh: dict[str, int]
    ranks: int
    trajectories: int
    mean: int
    cap: int
    prompt: int
    max_tokens: int
    steps: int
    loss_tokens: int


def answers_of(task: Task) -> Any:
    """[ranks * trajectories] tokens of each answer."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(task.mean) - SIGMA**2 / 2, SIGMA, task.ranks * task.trajectories)
    return drawn.clip(8, task.cap).astype(np.int32)


def batch_of(
    lengths: Any,
    prompt: int,
    settings: Any,
    vocabulary: int,
    rank: int = 0,
    world_size: int = 1,
    loss_tokens: int = 0,
) -> Any:
    """One rank's part of a batch of groups of GROUP, assigned as replay does.

    Args:
        lengths: tokens of each answer.
        prompt: tokens of each prompt.
        settings: the learner section of the configuration.
        vocabulary: ids are drawn from.
        rank, world_size: place among those that have parts of their own.
        loss_tokens: last tokens of each answer that are in the loss; 0 for all.
    """
    from replay.batches.sharing import Members, assign
    from replay.messages import Batch

    random = np.random.default_rng(1)
    n, total = len(lengths), int(lengths.sum())
    groups = (np.arange(n) // (settings.facts.answers or GROUP)).astype(np.int32)
    members = Members(
        prompts=np.full(n, prompt),
        answers=lengths.astype(np.int64),
        groups=groups.astype(np.int64),
        trained=np.ones(n, np.bool_),
    )
    placed = assign(members, settings.share_prefixes, world_size, settings.max_tokens_per_microbatch)
    prompts = random.integers(3, vocabulary, (groups[-1] + 1, prompt))
    answers = np.split(random.integers(3, vocabulary, total), np.cumsum(lengths)[:-1])
    logprobs = np.split(-np.log(vocabulary) + random.normal(0, 0.1, total), np.cumsum(lengths)[:-1])
    mine = np.flatnonzero(placed.rank == rank).astype(np.int32)
    own = int(lengths[mine].sum())
    trained = np.minimum(lengths, loss_tokens or lengths)
    masks = [np.arange(length, 0, -1) <= count for length, count in zip(lengths[mine], trained[mine], strict=True)]
    return Batch(
        step=1, rank=rank, num_microbatches=placed.num_microbatches, total_loss_tokens=int(trained.sum()),
        group_ids=[[0, int(group)] for group in np.unique(groups)], stats={}, lag_histogram={},
        trajectory=mine, microbatch=placed.microbatch[mine],
        prompt_lengths=np.full(len(mine), prompt, np.int32), lengths=lengths[mine],
        token_ids=np.concatenate([part for i in mine for part in (prompts[groups[i]], answers[i])]).astype(np.int32),
        loss_mask=np.concatenate(masks).astype(np.uint8),
        logprobs=np.concatenate([logprobs[i] for i in mine]).astype(np.float32),
        versions=np.zeros(own, np.int32), all_rewards=random.integers(0, 2, n).astype(np.float32),
        all_groups=groups, all_loss_tokens=trained,
    )  # fmt: skip


def flops(model: Any, rows: Any) -> float:
    """Of one update on these rows: see the module's docstring."""
    from learner.policy.flops import flops_of

    return flops_of(Sizes.of(model.to_dict()), rows)


def answers_a_group(heat: str) -> int:
    return 1 if "objective" in HEATS.get(heat, {}) else GROUP


def config_of(task: Task, folder: str) -> Any:
    import torch

    from configs.loading import validate

    groups = task.ranks * task.trajectories // answers_a_group(task.heat)
    rollout = {"max_new_tokens": task.cap, "group_size": GROUP, "groups_per_step": groups}
    learner = {"max_tokens_per_microbatch": task.max_tokens, "warmup_steps": 0, "lr": 1e-6}
    tree = {
        "model": {"path": folder},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": task.prompt},
        "rollout": rollout,
        "learner": learner | HEATS[task.heat] | {"mesh": task.mesh},
        "placement": {"device": "cuda" if torch.cuda.is_available() else "cpu", "split": f"1:{task.ranks}"},
    }
    return validate(tree, "bench learner")


class Clock:
    """Seconds of each phase between device synchronisations."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A span of learner.trainer.Trainer."""
        began = device_time(self.device)
        yield
        self.seconds.setdefault(name, []).append(device_time(self.device) - began)


def random_policy(config: Any, mesh: Any, device: Any, budget: Any) -> Any:
    """The policy that config.json describes: weights of deviation 0.02, norms of one, biases of zero."""
    from learner.policy.model import shaped_policy

    policy = shaped_policy(config, mesh, device, budget)
    for shard in policy.shards():
        if shard.name.endswith("norm.weight"):
            shard.local.fill_(1)
        elif shard.name.endswith(".bias"):
            shard.local.zero_()
        else:
            shard.local.normal_(0, 0.02)
    return policy


def over_ranks(model: Any, rows: Any, device: Any, tensor: int) -> tuple[int, int, float]:
    """Of all ranks: tokens that are computed, those of trajectories (prompts are shared), and FLOPs."""
    import torch
    import torch.distributed as dist

    tokens, saved = sum(row.input_ids.numel() for row in rows), sum(row.saved for row in rows)
    sums = torch.tensor([tokens, saved, flops(model, rows)], dtype=torch.float64, device=device) / tensor
    dist.all_reduce(sums)
    return int(sums[0]), int(sums[0] + sums[1]), float(sums[2])


def run_heat(task: Task) -> dict[str, Any]:
    """Warm up by two updates, then time `steps` of them; what rank 0 has measured, and sums over all ranks."""
    import torch

    from examples import random_qwen3
    from learner.optimizer import Optimizer
    from learner.policy.flops import peak_flops
    from learner.policy.memory import Setup
    from learner.policy.model import choose_for
    from learner.ranks import join_ranks
    from learner.trainer import Trainer, prepare

    model = random_qwen3.config(task.shape)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model.save_pretrained(folder)
        config = config_of(task, folder)
        ranks = stack.enter_context(join_ranks(config))
        budget = choose_for(Setup.of(config, model.to_dict()), ranks.mesh, ranks.device)
        policy, clock = random_policy(config, ranks.mesh, ranks.device, budget), Clock(ranks.device)
        trainer = Trainer(config, policy, Optimizer(config.learner, policy), clock)
        tensor = config.learner.mesh.tensor
        place = ranks.rank // tensor, ranks.world_size // tensor
        batch = batch_of(answers_of(task), task.prompt, config.learner, policy.vocab_size, *place, task.loss_tokens)
        updates = []
        for step in range(WARM_UP + task.steps):
            if step == WARM_UP:
                policy.communication.take()  # begins to measure
            with clock("step"):
                updates.append(trainer.train_step(batch))
            if updates[-1].reason:
                raise CaseFailed(f"{task.heat}: step {step} was not applied: {updates[-1].reason}")
        timed = {name: seconds[WARM_UP:] for name, seconds in clock.seconds.items()}
        step_s, communication_s = statistics.median(timed["step"]), policy.communication.take() / task.steps
        rows = prepare(batch, trainer.advantage, config).rows
        computed, tokens, whole = over_ranks(model, rows, ranks.device, tensor)
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
        return {
            **{name: getattr(task, name) for name in ("shape", "heat", "ranks", "mesh", "max_tokens", "loss_tokens")},
            "device": device,
            "torch": torch.__version__,
            "step_s": step_s,
            "phases_s": {name: statistics.median(seconds) for name, seconds in timed.items()},
            "first_step_s": clock.seconds["step"][0],
            "tokens": tokens,
            "tokens_per_s": tokens / step_s,
            "tokens_per_s_a_device": tokens / step_s / task.ranks,
            "tokens_computed": computed,
            "mfu": whole / step_s / speed / task.ranks if (speed := peak_flops(device)) else None,
            "peak_gib": max(update.sums.values["peak_bytes_max"] for update in updates[WARM_UP:]) / 2**30,
            "microbatches": len(rows),
            "fill": statistics.mean(row.input_ids.numel() for row in rows) / max(row.input_ids.numel() for row in rows),
            "communication_s": communication_s,
            "first_loss": updates[0].sums.loss,
            "first_grad_norm": updates[0].sums.grad_norm,
            "attention": policy.model.transformer.config._attn_implementation,
            "recompute": policy.budget.recompute,
            "keeps_gathered": policy.budget.keeps_gathered,
            "budget_gib": policy.budget.total / 2**30,
        }


def command(argv: Sequence[str]) -> int:
    """Run the heats of every shape; the last line is one object of JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench learner", description=__doc__)
    parser.add_argument("--shapes", default="tiny", help="names of examples.random_qwen3, with commas")
    parser.add_argument("--heats", default=",".join(HEATS).replace(", ", "+"), help="with commas; + for a comma inside")
    for name, (default, text) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text}: %(default)s")
    parser.add_argument("--mesh", default="", help="of the ranks, such as tensor=2; they shard where it is left out")
    parser.add_argument("--limit-s", type=float, default=150.0, help="for one heat, its start included")
    parser.add_argument("--out", type=Path, help="JSON of all heats")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.task:
        die_with_parent(int(os.environ.get(PARENT, os.getppid())))
        result = run_heat(Task(**json.loads(options.task)))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result), flush=True)
        os._exit(0)
    heats = [name.replace("+", ", ") for name in options.heats.split(",")]
    least = max(-(-answers_a_group(heat) // options.ranks) for heat in heats)
    if options.trajectories < least:
        parser.error(f"--trajectories {options.trajectories}: not one group of {GROUP} answers; give {least} or more")
    mesh = {name: int(size) for name, _, size in (one.partition("=") for one in options.mesh.split(",") if one)}
    results: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        for heat in heats:
            task = Task(shape, heat, mesh, **{name: getattr(options, name) for name in SIZES})
            own = ["-m", "scripts.bench", "learner", "--task", json.dumps(asdict(task))]
            if task.ranks > 1:
                own = [*TORCHRUN, f"--nproc-per-node={task.ranks}", *own]
            try:
                said = output_of(heat, own, options.limit_s).splitlines()
                results.append(json.loads([text for text in said if text.startswith("{")][-1]))
                say(line(results[-1]))
            except CaseFailed as error:
                results.append({"shape": shape, "heat": heat, "error": str(error)[-2000:]})
                say(f"{shape} {heat}: {error}")
            if options.out:
                write_json(options.out, results)
    print(json.dumps({"learner": results}))
    return int(any("error" in result for result in results))


def line(result: dict[str, Any]) -> str:
    """One heat for the reader."""
    mfu = f"{result['mfu']:.1%}" if result["mfu"] else "-"
    alone = (result["mfu"] or 0) * result["step_s"] / result["phases_s"]["gradients"]
    inner = f" ({alone:.1%} of forward and backward)" if result["mfu"] else ""
    ranks = f" on {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return (
        f"{result['shape']} {result['heat']}{ranks}: {result['tokens_per_s']:,.0f} tokens/s, MFU {mfu}{inner},"
        f" {result['peak_gib']:.1f} GiB, step {result['step_s']:.2f} s, first {result['first_step_s']:.1f} s"
    )
