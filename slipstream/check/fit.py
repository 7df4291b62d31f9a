"""`python -m slipstream.check.fit --config NAME`: the largest microbatch of a learner GPU, by the memory budget.

For each way to recompute (learner/policy/memory.py). It needs config.json of the model, not its weights, and no GPU.
The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.loading import Parser, add_arguments, from_arguments
from configs.schema import Config
from learner.policy.memory import GIB, Recompute, Setup, available_bytes, choose, largest_microbatch
from slipstream.runtime.fingerprint import FingerprintError, read_json
from slipstream.runtime.program import program

LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


def main() -> int:
    """Entry point; exit code 0: it fits, 1: it does not, 2: bad configuration."""
    formatter = argparse.RawTextHelpFormatter
    parser = Parser(prog=program("slipstream.check.fit"), description=__doc__, formatter_class=formatter)
    add_arguments(parser)
    args = parser.parse_args()
    try:
        config = from_arguments(args)
        table, verdict = estimated(config, read_json(Path(config.model.path) / "config.json"), available_bytes(config))
    except (ConfigError, FingerprintError) as error:
        sys.stderr.write(f"refused: {error}\n")
        return 2
    sys.stdout.write(f"{table}\n{json.dumps(verdict)}\n")
    return 0 if verdict["fits"] else 1


def estimated(config: Config, model: Mapping[str, Any], available: int | None) -> tuple[str, dict[str, Any]]:
    """A table of what each way to recompute takes and leaves, and whether the configured microbatch fits.

    Args:
        config: of the run.
        model: its config.json.
        available: bytes of a GPU; None where no GPU is known.
    """
    learner, ranks = config.learner, config.num_learner_ranks
    given, most = learner.max_tokens_per_microbatch, dict[str, int | None]()
    room = "no GPU is known here: set placement.gpu_gib" if available is None else f"{available / GIB:.1f} GiB to use"
    lines = [
        f"{config.model.path} on {ranks} learner rank(s), {room}",
        f"{'recompute':<12}{f'GiB for {given} tokens':>24}{'most tokens':>26}",
    ]
    for level in ("full",) if learner.offload_activations else LEVELS:
        changed = learner.model_copy(update={"recompute": level})
        setup = Setup.of(config.model_copy(update={"learner": changed}), model)
        most[level] = None if available is None else largest_microbatch(setup, available)
        shown = "-" if most[level] is None else str(most[level])
        lines.append(f"{level:<12}{choose(setup, available).total / GIB:>24.1f}{shown:>26}")
    asked = [most[level] for level in most if learner.recompute in ("auto", level)]
    verdict = {"model": config.model.path, "ranks": ranks, "configured": given, "recompute": learner.recompute}
    verdict |= {"estimated": most, "fits": any(tokens is None or tokens >= given for tokens in asked)}
    return "\n".join(lines), verdict


if __name__ == "__main__":
    sys.exit(main())
