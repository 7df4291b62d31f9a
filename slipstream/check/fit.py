"""`python -m slipstream.check.fit --config NAME`: the largest microbatch of a learner GPU, by the memory budget.

For each way to recompute (learner/policy/memory.py). It needs config.json of the model, not its weights, and no GPU.
The last line is JSON.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.loading import Parser, add_arguments, from_arguments
from configs.schema import Config
from learner.policy.memory import GIB, Budget, Recompute, Setup, available_bytes, choose, largest_microbatch
from slipstream.runtime.fingerprint import FingerprintError, read_json
from slipstream.runtime.program import program

LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Fit:
    """What one way to recompute takes."""

    recompute: Recompute
    budget: Budget
    """At the configured microbatch."""
    tokens: int | None
    """Most of a microbatch; None where no GPU is known."""


def main() -> int:
    """Entry point; exit code 0: it fits, 1: it does not, 2: bad configuration."""

    formatter = argparse.RawTextHelpFormatter
    parser = Parser(prog=program("slipstream.check.fit"), description=__doc__, formatter_class=formatter)
    add_arguments(parser)
    args = parser.parse_args()
    try:
        config = from_arguments(args)
        model = read_json(Path(config.model.path) / "config.json")
        available = available_bytes(config)
        fits = [estimate(config, model, level, available) for level in levels_of(config)]
    except (ConfigError, FingerprintError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 2
    sys.stdout.write(report(config, fits, available))
    return 0 if verdict(config, fits)["fits"] else 1


def levels_of(config: Config) -> tuple[Recompute, ...]:
    """The ways to recompute that this configuration can go."""
    return ("full",) if config.learner.offload_activations else LEVELS


def estimate(config: Config, model: dict[str, Any], level: Recompute, available: int | None) -> Fit:
    """What recomputing as `level` says takes and leaves."""
    learner = config.learner.model_copy(update={"recompute": level})
    setup = Setup.of(config.model_copy(update={"learner": learner}), model)
    return Fit(level, choose(setup, available), None if available is None else largest_microbatch(setup, available))


def verdict(config: Config, fits: list[Fit]) -> dict[str, Any]:
    """The last line: tokens by way, and whether the configured microbatch fits in the configured way."""
    asked, given = config.learner.recompute, config.learner.max_tokens_per_microbatch
    allowed = [fit.tokens for fit in fits if asked in ("auto", fit.recompute)]
    return {
        "model": config.model.path,
        "ranks": config.num_learner_ranks,
        "configured": given,
        "recompute": asked,
        "estimated": {fit.recompute: fit.tokens for fit in fits},
        "fits": any(tokens is None or tokens >= given for tokens in allowed),
    }


def report(config: Config, fits: list[Fit], available: int | None) -> str:
    """A table, what to set, and the verdict as JSON."""
    room = "no GPU is known here: set placement.gpu_gib" if available is None else f"{available / GIB:.1f} GiB to use"
    given = config.learner.max_tokens_per_microbatch
    lines = [
        f"{config.model.path} on {config.num_learner_ranks} learner rank(s), {room}",
        f"{'recompute':<12}{f'GiB for {given} tokens':>24}{'most tokens':>26}",
    ]
    for fit in fits:
        shown = "-" if fit.tokens is None else str(fit.tokens)
        lines.append(f"{fit.recompute:<12}{fit.budget.total / GIB:>24.1f}{shown:>26}")
    return "\n".join([*lines, json.dumps(verdict(config, fits))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
