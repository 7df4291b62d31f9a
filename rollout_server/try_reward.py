"""`python -m rollout_server.try_reward FILE`: judges a few answers and shows score, parts, errors and times.

FILE is a data file, whose answers are a column of it or the ground truth itself, or the folder of a run that has saved
trajectories (tracking.save_rollouts_every), which are judged again. The reward is that of `--config` and `--set`, of a
run folder its own; it runs as in a run, in the same processes and with the same limits.
"""

import argparse
import asyncio
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from configs.loading import ConfigError, Parser, add_arguments, find, load, overrides_of
from configs.schema import Config
from replay.batches.overlong import penalty
from replay.data import DataError, prompt_source, read_rows
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample
from rollout_server.tasks.rewards.pool import rewards_of
from rollout_server.tasks.task import Task, TaskError, load_tokenizer
from slipstream.runtime.program import program

SHOWN_CHARS = 60
STEPS = "rollouts/step_*"


@dataclass(frozen=True, slots=True)
class Case:
    """One answer to judge."""

    name: str
    sample: Sample
    recorded: float | None = None
    """Its score in the run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, 1 where a call failed, 2 where nothing could be judged."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rollout_server.tasks.rewards").setLevel(logging.INFO)  # what reward code prints
    try:
        config = load(_config_of(args), overrides_of(args))
        is_run = Path(args.file).is_dir()
        cases = list(itertools.islice(_recorded(config, Path(args.file)) if is_run else _rows(config, args), args.rows))
        if not cases:
            raise DataError(f"{args.file}: there is nothing to judge")
        started = time.monotonic()
        outcomes = asyncio.run(_judge(config, cases))
    except (ConfigError, DataError, RewardError, TaskError) as error:
        sys.stderr.write(f"try_reward: {error}\n")
        return 2
    show(config, cases, outcomes, time.monotonic() - started)
    return int(any(outcome.error for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=program("rollout_server.try_reward"), description=__doc__)
    parser.add_argument("file", help="a data file, or the folder of a run with saved trajectories")
    add_arguments(parser)
    parser.add_argument("--rows", "-n", type=int, default=16, help="answers to judge, from the first on (%(default)s)")
    parser.add_argument("--answers", metavar="COLUMN", help="column with the answers; without it the ground truth is")
    parser.add_argument("--as", dest="form", default="{}", help="the answer around a ground truth, {} in its place")
    return parser


def _config_of(args: argparse.Namespace) -> str:
    """The configuration to take: a run's own, unless another is named."""
    own = Path(args.file) / "config.yaml"
    is_named = args.config != _parser().get_default("config")
    return str(own) if own.is_file() and not is_named else str(find(args.config))


def _rows(config: Config, args: argparse.Namespace) -> Iterator[Case]:
    count = _token_counter(config)
    for number, row in enumerate(read_rows(args.file), start=1):
        if args.answers is None:
            answer = args.form.replace("{}", _text(row["ground_truth"]))
        else:
            given = {**row["columns"], **row["extra_info"], "ground_truth": row["ground_truth"]}
            if args.answers not in given:
                raise DataError(f"--answers {args.answers}: row {number} has no such column; it has {', '.join(given)}")
            answer = _text(given[args.answers])
        sample: Sample = {
            "prompt": row["prompt"],
            "completion": answer,
            "ground_truth": row["ground_truth"],
            "data_source": row["data_source"],
            "extra_info": row["extra_info"],
            "columns": row["columns"],
            "num_tokens": count(answer),
            "finish_reason": "stop",
        }
        yield Case(str(number), sample)


def _recorded(config: Config, folder: Path) -> Iterator[Case]:
    """The trajectories of a run's newest saved steps first. Raises DataError: none, or not those of its data."""
    if config.environment.function is not None:
        raise DataError(
            f"{folder}: its trajectories are episodes of environment.function {config.environment.name!r}: what was"
            " judged there, if not by that function, is the last answer alone; give a data file with --answers"
        )
    steps = sorted(folder.glob(STEPS), key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
    if not steps:
        raise DataError(f"{folder}: no saved trajectories ({STEPS}); run with --set tracking.save_rollouts_every=10")
    task, source = Task(config), prompt_source(config)
    for step in steps:
        for file in sorted(step.glob("rank_*.jsonl")):
            # By newlines alone, for texts have other ends of lines; what follows the last one is empty or was cut.
            for line in file.read_bytes().split(b"\n")[:-1]:
                record = json.loads(line)
                ids, index = record["response_ids"], record["group"][1]
                reason = "stop" if ids and ids[-1] in task.stop_token_ids else "length"
                name, row = f"{step.name}/{record['trajectory']}", source.row(index)
                if task.encode(row) != record["prompt_ids"]:
                    raise DataError(
                        f"{folder}: prompt {index} of data.train is not the one that {name} answers; the data, its"
                        " weights or the chat template were changed since, or its level followed the answers"
                        " (data.curriculum pass_rate), which this run's trajectories do not tell"
                    )
                yield Case(name, task.sample(row, ids, reason), record["score"] + _cost(config, len(ids)))


def _cost(config: Config, num_tokens: int) -> float:
    """What algorithm.overlong_buffer has taken from the score of an answer: it is saved as it was trained."""
    if not config.algorithm.overlong_buffer:
        return 0.0
    return float(penalty(np.array([num_tokens], np.int32), config.algorithm, config.rollout.max_new_tokens)[0])


def _token_counter(config: Config) -> Any:
    """Counts the tokens of an answer, its stop token included; words where the model is not here."""
    if not Path(config.model.path).is_dir():
        return lambda text: len(text.split()) + 1
    tokenizer = load_tokenizer(config.model.path)
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids) + 1


async def _judge(config: Config, cases: Sequence[Case]) -> list[RewardOutcome]:
    async with rewards_of(config.reward) as rewards:
        return await rewards.score([case.sample for case in cases])


def show(config: Config, cases: Sequence[Case], outcomes: Sequence[RewardOutcome], wall_s: float) -> None:
    """Print a table of all answers, then sums over them."""
    metrics = list(dict.fromkeys(name for outcome in outcomes for name in outcome.metrics))
    parts = [name for name in metrics if "/" not in name]
    is_recorded = any(case.recorded is not None for case in cases)
    table = Table(title=f"reward.function: {config.reward.shown}")
    for name in ("row", "score", *(["recorded"] if is_recorded else []), *parts, "ms", "answer"):
        table.add_column(name, justify="left" if name == "answer" else "right", overflow="fold")
    for case, outcome in zip(cases, outcomes, strict=True):
        score = "error" if outcome.error else f"{outcome.score:.4g}"
        recorded = [_number(case.recorded)] if is_recorded else []
        values = [_number(outcome.metrics.get(name)) for name in parts]
        answer = repr(case.sample["completion"][-SHOWN_CHARS:])
        table.add_row(case.name, score, *recorded, *values, f"{1000 * outcome.seconds:.1f}", answer)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    console.print(table)
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome.error:
            console.print(f"row {case.name}: {outcome.error}")
    scores = [outcome.score for outcome in outcomes if outcome.error is None]
    seconds = [outcome.seconds for outcome in outcomes]
    mean = math.fsum(scores) / len(scores) if scores else math.nan
    console.print(
        f"{len(cases)} answers, {len(cases) - len(scores)} errors; score mean {mean:.4g},"
        f" min {min(scores, default=math.nan):.4g}, max {max(scores, default=math.nan):.4g};"
        f" a call {1000 * math.fsum(seconds) / len(seconds):.1f} ms, at most {1000 * max(seconds):.1f} ms;"
        f" all in {wall_s:.2f} s"
    )
    for name in metrics:
        values_of = [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]
        console.print(f"  {name}: mean {math.fsum(values_of) / len(values_of):.4g} of {len(values_of)}")
    if is_recorded:
        pairs = [(case.recorded, outcome.score) for case, outcome in zip(cases, outcomes, strict=True)]
        differ = sum(one is None or not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6) for one, other in pairs)
        console.print(f"{differ} of {len(cases)} differ from the score in the run")
    if not Path(config.model.path).is_dir():
        console.print(f"num_tokens are words: there is no model at {config.model.path} (--config names yours)")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
