"""`python -m slipstream.plan RUN_DIR --gpus N`: step time, eta and idle shares of every split and lag.

Engines, learner and weight bus get the times that were measured in that run; replay's rules run on a simulated clock.
Every constant is printed with its source; --cost replaces one. What is not known is the same on every line, so the
order of the splits is more certain than the times. Splits that need more memory than placement.gpu_gib are refused.
The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.errors import BadOption
from configs.loading import dump, parse
from configs.schema import Config
from learner.record.metrics import MetricsError
from replay.journal import JournalError
from slipstream.plan import fitting, sources
from slipstream.plan.advice import Advised, Split, advise, splits, table, yaml_of
from slipstream.runtime.fingerprint import FingerprintError, read_json
from slipstream.runtime.program import program

TEACHER = "beside it with a teacher of SIZE times the policy's parameters on so many GPUs of its own, such as 1:1"


def main() -> int:
    """Entry point; exit code 0: there is a split, 1: none fits, 2: bad input."""
    try:
        return _run(_parser().parse_args())
    except (ConfigError, MetricsError, JournalError, FingerprintError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("slipstream.plan"), description=__doc__)
    parser.add_argument("source", type=Path, help="run folder")
    parser.add_argument("--gpus", type=int, help="GPUs to split; default: as many as measured")
    parser.add_argument("--model", type=Path, help="folder with the config.json of the model, for what fits")
    parser.add_argument("--lags", type=_numbers, help="such as 0,1,2; default: the configured one and one more")
    parser.add_argument("--tp", type=_numbers, help="GPUs of an engine, such as 1,2; default: as configured")
    parser.add_argument("--steps", type=int, help="counted steps of each simulated run (default: 16, of large runs 4)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=VALUE", help="a constant by hand")
    parser.add_argument("--teacher", type=_teacher, metavar="SIZE:GPUS", help=TEACHER)
    parser.add_argument("--out", type=Path, help="file for all predictions as JSON")
    return parser


def _teacher(text: str) -> float:
    """What a token takes it, in prefills of the policy's on one GPU."""
    size, _, gpus = text.partition(":")
    if int(gpus) < 1:
        raise ValueError(gpus)
    return float(size) / int(gpus)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _run(args: argparse.Namespace) -> int:
    measured = sources.of_run(args.source)
    fitted = fitting.fit(measured).with_costs(_costs(args.cost), "--cost")
    config = parse(dump(measured.config), "the measured configuration", args.set)
    sources.check(config)
    sys.stdout.write(f"constants\n{fitted.describe()}\n\n")
    found = advise(config, fitted, _candidates(args, config), model=_model(args.model, config), steps=args.steps)
    present = next((one for one in found if one.split == Split.of(config) and one.outcome is not None), None)
    sys.stdout.write(table(found, present) + "\n")
    if found[0].outcome is None:
        return 1
    best = best_of(found, config.replay.async_lag)
    said = {"best": best.as_json(), "plans": len(found)}
    if args.teacher is not None:
        alone, score_token_s = present or best, args.teacher * fitted.costs.prefill_token_s * fitted.costs.engine_gpus
        with_it = fitted.with_costs({"score_token_s": score_token_s}, "--teacher")
        taught = advise(config, with_it, [alone.split], model=_model(args.model, config), steps=args.steps)
        sys.stdout.write(f"\nwithout and with the teacher\n{table([alone, *taught], alone)}\n")
        said |= {"alone": alone.as_json(), "with_teacher": taught[0].as_json()}
    text = yaml_of(config, best.split)
    sys.stdout.write(f"\nfastest at lag {best.split.lag}: set\n{text}\n")
    if args.out is not None:
        plans = [one.as_json() for one in found]
        whole = {"plans": plans, "yaml": text, "constants": asdict(fitted.costs), "sources": dict(fitted.sources)}
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def _candidates(args: argparse.Namespace, config: Config) -> list[Split]:
    shared, lag = config.placement.share_gpus, config.replay.async_lag
    gpus = args.gpus or config.num_rollout_devices * (not shared) + config.num_learner_ranks
    lags, tps = args.lags or sorted({lag, min(8, lag + 1)}), args.tp or [config.placement.tensor_parallel]
    return list(splits(gpus, lags=lags, tps=tps, model_ranks=config.learner.mesh.tensor, shared=shared))


def best_of(found: Sequence[Advised], lag: int) -> Advised:
    """The fastest at the configured lag, because a higher one changes what is learnt, where there is one."""
    return next((one for one in found if one.split.lag == lag and one.outcome is not None), found[0])


def _costs(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise BadOption(f"--cost {text!r}: expected NAME=VALUE, such as publish_s=0.1") from error
    return found


def _model(folder: Path | None, config: Config) -> Mapping[str, Any] | None:
    path = (folder or Path(config.model.path)) / "config.json"
    return read_json(path) if folder is not None or path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
