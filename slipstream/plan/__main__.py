"""`python -m slipstream.plan SOURCE --gpus N`: step time, eta and idle shares of every split and lag.

SOURCE is the folder of a run, or a JSON file of `python -m scripts.bench pipeline --out`. Engines, learner and weight
bus get the times that were measured there; replay's own code runs on a simulated clock. Every constant is printed with
its source; --cost replaces one. What is not known is the same on every line, so the order of the plans is more certain
than the times. Plans that need more memory than placement.gpu_gib are refused. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.errors import BadOption
from configs.loading import apply_override, dump, parse
from configs.schema import Config
from learner.record.metrics import MetricsError
from replay.journal import JournalError
from slipstream.plan import fitting, sources
from slipstream.plan.advice import Advised, Effort, Plan, advise, balance_of, plans, table, yaml_of
from slipstream.plan.costs import Fitted
from slipstream.plan.sources import Measured
from slipstream.runtime.fingerprint import FingerprintError, read_json
from slipstream.runtime.program import program

LONG_YAML = 400


def main() -> int:
    """Entry point; exit code 0: there is a plan, 1: none fits, 2: bad input."""
    args = _parser().parse_args()
    try:
        return _run(args)
    except (ConfigError, MetricsError, JournalError, FingerprintError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("slipstream.plan"), description=__doc__)
    parser.add_argument(
        "source", type=Path, nargs="+", help="run folder, or JSON of the pipeline benchmark; or several"
    )
    parser.add_argument("--gpus", type=int, help="GPUs to split; default: as many as measured")
    parser.add_argument("--case", help="of a benchmark file: those whose name begins so, such as 1.7B@1:1")
    parser.add_argument("--model", type=Path, help="folder with the config.json of the model, for what fits")
    parser.add_argument("--lags", type=_numbers, help="such as 0,1,2; default: the configured one and one more")
    parser.add_argument("--tp", type=_numbers, help="GPUs of an engine, such as 1,2; default: as configured")
    parser.add_argument("--splits", help="only these, such as 6:2,5:3")
    parser.add_argument("--steps", type=int, help="counted steps of each simulated run (default: 16, of large runs 4)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=VALUE", help="a constant by hand")
    parser.add_argument("--out", type=Path, help="file for all predictions as JSON")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    cases = _cases(args.source, args.case or "")
    fitted = fitting.fit(cases).with_costs(_costs(args.cost), "--cost")
    measured = cases[0].config
    config = _changed(measured, args.set)
    sources.check(config)
    shares = measured.placement.share_gpus
    gpus = args.gpus or measured.num_rollout_devices * (not shares) + measured.num_learner_ranks
    sys.stdout.write(f"constants\n{fitted.describe()}\n\n")
    candidates = _candidates(args, config, fitted, gpus)
    effort, model = Effort.of(config, args.steps), _model(args.model, config)
    found = advise(config, fitted, candidates, model=model, effort=effort)
    if found[0].prediction is None:
        sys.stdout.write(table(found, None) + "\n")
        return 1
    present = next((a for a in found if a.plan == _present(config)), None)
    sys.stdout.write(table(found, present if present and present.prediction else None) + "\n\n")
    best = best_of(found, config.replay.async_lag)
    text = yaml_of(config, best.plan)
    shown = text if len(text) < LONG_YAML else f"{text[:LONG_YAML]} ... (--out has all of it)"
    sys.stdout.write(f"fastest at lag {best.plan.lag}: set\n{shown}\n")
    whole = {"plans": [a.as_json() for a in found], "yaml": text, "seconds": round(time.monotonic() - started, 1)}
    if args.out is not None:
        constants = {name: getattr(fitted.costs, name) for name in fitted.costs.__dataclass_fields__}
        args.out.write_text(
            json.dumps(whole | {"constants": constants, "sources": dict(fitted.sources)}, indent=1) + "\n"
        )
    sys.stdout.write(json.dumps({"best": best.as_json(), "plans": len(found), "seconds": whole["seconds"]}) + "\n")
    return 0


def _cases(given: Sequence[Path], wanted: str) -> list[Measured]:
    """Of one model. Raises ConfigError."""
    cases = [case for source in given for case in sources.read(source)]
    kept = [case for case in cases if case.is_run or case.name.startswith(f"case {wanted}")]
    if not kept:
        raise BadOption(f"--case {wanted!r}: there is no such case; there are {'; '.join(c.name for c in cases)}")
    if len({case.config.model.path if case.is_run else case.name.partition("@")[0] for case in kept}) > 1:
        raise BadOption(
            f"several models were measured: {'; '.join(c.name for c in kept)}; give runs or a --case of one"
        )
    return kept


def best_of(found: Sequence[Advised], lag: int) -> Advised:
    """The fastest at the configured lag, because a higher one changes what is learnt, where there is one."""
    return next((a for a in found if a.plan.lag == lag and a.prediction is not None), found[0])


def _candidates(args: argparse.Namespace, config: Config, fitted: Fitted, gpus: int) -> list[Plan]:
    lag, tp = config.replay.async_lag, config.placement.tensor_parallel
    lags, tps = args.lags or sorted({lag, min(8, lag + 1)}), args.tp or [tp]
    if args.splits:
        pairs = [tuple(map(int, split.split(":"))) for split in args.splits.split(",")]
        return [Plan(rollout=r, learner=n, lag=lag, tensor_parallel=tp) for r, n in pairs for lag in lags for tp in tps]
    balance = balance_of(config, fitted.costs, fitted.workload)
    ranks, shared = config.learner.mesh.tensor, config.placement.share_gpus
    return list(plans(gpus, balance, lags=lags, tps=tps, model_ranks=ranks, shared=shared))


def _present(config: Config) -> Plan:
    return Plan(
        rollout=config.num_rollout_devices,
        learner=config.num_learner_ranks,
        lag=config.replay.async_lag,
        tensor_parallel=config.placement.tensor_parallel,
    )


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    for override in overrides:
        apply_override({}, override)  # its form
    return parse(dump(config), "the measured configuration", overrides) if overrides else config


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
    if folder is not None:
        return read_json(folder / "config.json")
    path = Path(config.model.path) / "config.json"
    return read_json(path) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
