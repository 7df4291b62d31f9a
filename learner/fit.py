"""`python -m learner.fit --config NAME`: the largest microbatch of a learner GPU, before any run.

Estimates are those of the memory budget (learner/policy/memory.py), for each way to recompute. On a machine with a GPU
the largest microbatch is measured as well: this process takes the place of one learner rank among as many as the
placement has, with collectives that move nothing, and makes real steps on answers of full length. It needs config.json
of the model, not its weights. The last line is JSON.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.base import ConfigError
from configs.command import program
from configs.errors import Contradiction
from configs.loading import Parser, add_arguments, from_arguments
from configs.machine import has_usable_gpu
from configs.schema import Config
from learner.policy.memory import GIB, Budget, Recompute, Setup, available_bytes, choose, largest_microbatch, usable
from replay.fingerprint import FingerprintError, read_json
from replay.pictures import vision_of

if TYPE_CHECKING:
    from learner.policy.model import Policy
    from learner.rows import Row

LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")
BESIDE = ("reference weights", "critic weights and AdamW state", "packed versions (rank 0)")
"""Items of the budget that measured steps do not make: memory of their size is held meanwhile."""
MICROBATCHES = 2
"""Of a measured step: the second one finds what the first leaves behind."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What one way to recompute takes."""

    recompute: Recompute
    budget: Budget
    """At the configured microbatch."""
    estimated: int | None
    """Most tokens of a microbatch by the budget; None where no GPU is known."""
    measured: int | None = None
    """The same by steps that were made; 0 where no microbatch of the longest answer fits."""


def main() -> int:
    """Entry point; exit code 0: it fits, 1: it does not, 2: bad configuration."""
    parser = Parser(prog=program("learner.fit"), description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--estimate", action="store_true", help="do not measure, also where there is a GPU")
    args = parser.parse_args()
    try:
        config = from_arguments(args)
        model = read_json(Path(config.model.path) / "config.json")
        available = available_bytes(config)
        fits = [estimate(config, model, level, available) for level in levels_of(config)]
        if not args.estimate and vision_of(model) is not None:
            raise Contradiction("model.path: takes pictures, and only rows of text are measured here; take --estimate")
        if not args.estimate and config.placement.device != "cpu" and has_usable_gpu(os.environ):
            fits = [Fit(fit.recompute, fit.budget, fit.estimated, measure(config, model, fit)) for fit in fits]
    except (ConfigError, FingerprintError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 2
    sys.stdout.write(report(config, fits, available))
    return 0 if verdict(config, fits)["fits"] else 1


def levels_of(config: Config) -> tuple[Recompute, ...]:
    """The ways to recompute that this configuration can go."""
    return ("full",) if config.learner.offload_activations else LEVELS


def with_recompute(config: Config, level: Recompute) -> Config:
    """The same configuration, recomputing as `level` says."""
    learner = config.learner.model_copy(update={"recompute": level})
    return config.model_copy(update={"learner": learner})


def estimate(config: Config, model: dict[str, Any], level: Recompute, available: int | None) -> Fit:
    """By the budget alone."""
    setup = Setup.of(with_recompute(config, level), model)
    tokens = None if available is None else largest_microbatch(setup, available)
    return Fit(level, choose(setup, available), tokens)


def verdict(config: Config, fits: list[Fit]) -> dict[str, Any]:
    """The last line: tokens by way, and whether the configured microbatch fits in the configured way."""
    most = {fit.recompute: fit.estimated if fit.measured is None else fit.measured for fit in fits}
    asked = config.learner.recompute
    allowed = [tokens for level, tokens in most.items() if asked in ("auto", level)]
    given = config.learner.max_tokens_per_microbatch
    return {
        "model": config.model.path,
        "ranks": config.num_learner_ranks,
        "configured": given,
        "recompute": asked,
        "estimated": {fit.recompute: fit.estimated for fit in fits},
        "measured": {fit.recompute: fit.measured for fit in fits},
        "fits": any(tokens is None or tokens >= given for tokens in allowed),
    }


def report(config: Config, fits: list[Fit], available: int | None) -> str:
    """A table, what to set, and the verdict as JSON."""
    room = "no GPU is known here: set placement.gpu_gib" if available is None else f"{available / GIB:.1f} GiB to use"
    given = config.learner.max_tokens_per_microbatch
    lines = [
        f"{config.model.path} on {config.num_learner_ranks} learner rank(s), {room}",
        f"{'recompute':<12}{f'GiB for {given} tokens':>24}{'most tokens, estimated':>26}{'measured':>12}",
    ]
    for fit in fits:
        shown = ["-" if tokens is None else str(tokens) for tokens in (fit.estimated, fit.measured)]
        lines.append(f"{fit.recompute:<12}{fit.budget.total / GIB:>24.1f}{shown[0]:>26}{shown[1]:>12}")
    return "\n".join([*lines, json.dumps(verdict(config, fits))]) + "\n"


def measure(config: Config, model: dict[str, Any], fit: Fit) -> int:
    """Most tokens that steps survive, by eighths below 5/4 of the estimate; 0 for none. A try takes a compilation."""
    import torch
    from accelerate.utils import find_executable_batch_size

    longest = config.longest_trajectory
    tokens = max((fit.estimated or 0) * 5 // 4, longest)

    def fewer() -> int:
        nonlocal tokens
        sys.stderr.write(f"fit: recompute {fit.recompute}: {tokens} tokens do not fit\n")
        tokens = tokens * 7 // 8 if tokens * 7 // 8 >= longest else 0
        return tokens

    @find_executable_batch_size(starting_batch_size=tokens, reduce_batch_size_fn=fewer)  # type: ignore[untyped-decorator]
    def largest(tokens: int) -> int:
        sys.stderr.write(f"fit: recompute {fit.recompute}: two steps with microbatches of {tokens} tokens ...\n")
        make_steps(config, model, fit.recompute, tokens, torch.device("cuda"))
        return tokens

    try:
        return int(largest())
    except RuntimeError as error:
        if "No executable batch size found" in str(error):
            return 0
        raise


def make_steps(config: Config, model: dict[str, Any], level: Recompute, tokens: int, device: Any) -> int:
    """Two steps as rank 0 of the learner would make them; the most bytes that were allocated."""
    import torch

    from learner.objective import Objective
    from learner.optimizer import Optimizer
    from learner.step import take_peak_bytes

    config = with_recompute(config, level)
    setup = Setup.of(config, model).with_tokens(tokens)
    budget = choose(setup, available_bytes(config))
    objective, longest = Objective(config.algorithm), config.data.max_prompt_tokens + config.rollout.max_new_tokens
    with one_of(config, device) as mesh:
        held = torch.empty(taken_by_others(config, budget, device), dtype=torch.uint8, device=device)
        policy = random_policy(config, mesh, device, budget)
        optimizer = Optimizer(config.learner, policy)
        for _ in range(2):
            for number in range(1, MICROBATCHES + 1):
                row = full_row(tokens, longest, policy.vocab_size).to(device)
                policy.prepare_row(last=number == MICROBATCHES)
                loss, _ = objective(row, *policy.forward(row, config.rollout.temperature))
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(0.0)
            policy.clear_gradients()
        peak = take_peak_bytes(device)
        del held
    return peak


def taken_by_others(config: Config, budget: Budget, device: Any) -> int:
    """Bytes of the device that a run has no room in: models beside the policy, packed versions, an engine."""
    import torch

    models = {name: budget.items.get(name, 0) for name in BESIDE}
    if not budget.packs_on_device:
        del models["packed versions (rank 0)"]
    available = available_bytes(config)
    if device.type != "cuda" or available is None:
        return sum(models.values())
    whole = torch.cuda.get_device_properties(device).total_memory
    return sum(models.values()) + max(0, usable(whole) - available)


def random_policy(config: Config, mesh: Any, device: Any, budget: Budget) -> "Policy":
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


@contextmanager
def one_of(config: Config, device: Any) -> Iterator[Any]:
    """The learner's mesh with this rank alone; collectives return at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from learner.policy.meshes import make_meshes

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.num_learner_ranks)
    try:
        yield make_meshes(config.learner.mesh, device, timedelta(seconds=config.learner.collective_deadline_s))
    finally:
        dist.destroy_process_group()


def full_row(tokens: int, longest: int, vocab_size: int) -> "Row":
    """A row of trajectories of the longest length, all but their first tokens trained."""
    import torch

    from learner.rows import Row

    starts = [*range(0, tokens - 1, longest), tokens]
    lengths = [end - first for first, end in itertools.pairwise(starts)]
    kept = torch.cat([torch.arange(first, end - 1) for first, end in itertools.pairwise(starts)])
    ids = torch.arange(tokens) % vocab_size
    ones = torch.ones(len(kept))
    return Row(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        starts=torch.tensor(starts, dtype=torch.int32),
        longest=max(lengths),
        kept=kept,
        targets=ids[kept + 1],
        behaviour_logprobs=-ones,
        advantages=ones,
        weights=ones / len(kept),
        lags=0 * ones,
        lengths=torch.tensor(lengths) - 1,
        groups=torch.arange(len(lengths)),
        fresh=torch.ones(len(lengths), dtype=torch.bool),
    )


if __name__ == "__main__":
    sys.exit(main())
