"""`python -m scripts.bench_pipeline --configs 0.6B@1:1,0.6B@1:3`: how well rollouts, training and broadcast overlap.

Each case starts the processes of a run once (replay, rollout servers, learner ranks) on random weights of a shape,
with answers of forced lognormal lengths, and measures in that one run

    T_roll    a step with everything but the update: rollouts, admission and publications alone
    T_step    a step as it is, rollouts and training at the same time
    T_train   an update alone, on the batches of T_step, with the engines standing still

and eta = max(T_roll, T_train) / T_step: 1 means that the shorter side and the broadcast are hidden whole. After the
run, on the same devices, a bare broadcast of the same bytes is what the weight bus is held against. Where the answers'
lengths, the batch or the split are not yours, take --median, --cap, --groups or --configs.

Standard output gets markdown tables, and as its last line one object of JSON (of several cases: {"results": [...]}).
`--device cpu --quick` does all of it with a tiny model, the torch engine and gloo, in less than a minute.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.loading import ConfigError
from learner.report.metrics import MetricsError
from scripts.bench.numbers import result_of, with_raw, with_stream
from scripts.bench.random_model import SHAPES
from scripts.bench.run import CaseFailed, raw_broadcast, run_case, say
from scripts.bench.settings import BadOption, Case, Options
from scripts.bench.table import tables

QUICK = {
    "prompt": 16,
    "median": 24,
    "sigma": 0.5,
    "cap": 64,
    "groups": 4,
    "group_size": 4,
    "steps": 4,
    "max_running": 64,
    "microbatch": 1024,
    "bucket_mib": 0.125,
}
"""Defaults of --quick; every option still has its say."""
NORMAL = {
    "prompt": 256,
    "median": 512,
    "sigma": 0.7,
    "cap": 2048,
    "groups": 32,
    "group_size": 8,
    "steps": 6,
    "max_running": 512,
    "microbatch": 16384,
    "bucket_mib": 512,
}


def measure(options: Options, case: Case) -> dict[str, Any]:
    """All numbers of one case; what failed is in `error`, or in `raw_error` and `stream_error` beside the rest."""
    say(f"{case}: {options.plan.total_steps} steps, then {options.plan.train} updates alone")
    try:
        result = result_of(case, run := run_case(options, case))
    except (CaseFailed, ConfigError, MetricsError, KeyError) as error:
        say_logs(error)
        return {"config": str(case), "error": f"{type(error).__name__}: {error}"}
    try:
        if result["bus_bytes"]:
            result = with_raw(result, raw_broadcast(run.config, int(result["bus_bytes"])))
    except CaseFailed as error:
        result["raw_error"] = str(error)
    if options.stream:
        try:
            result = with_stream(result, run_case(options, case, stream=True))
        except (CaseFailed, KeyError) as error:
            say_logs(error)
            result["stream_error"] = str(error)
    return result


def say_logs(error: Exception) -> None:
    """The last lines of the processes of a case that failed."""
    if isinstance(error, CaseFailed) and error.logs:
        say(f"last lines of the logs:\n{error.logs}")


def write(path: Path, result: dict[str, Any]) -> None:
    """Append one result to a JSON file that holds a list, so that a later failure costs nothing that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps([*results, result], indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def parse(argv: Sequence[str] | None) -> tuple[Options, list[Case], Path | None]:
    """The options of the command. Exits on what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_pipeline", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shape, short answers, few steps")
    parser.add_argument("--configs", help="cases in order, such as 0.6B@1:1,1.7B@2:2 (SHAPE@ROLLOUT:LEARNER)")
    parser.add_argument("--shape", choices=list(SHAPES), help="shape of the only case (default: tiny with --quick)")
    parser.add_argument("--split", default="1:1", help="R:L of the only case (default: %(default)s)")
    parser.add_argument("--prompt", type=int, help="tokens of every prompt")
    parser.add_argument("--median", type=int, help="median of the answers' lognormal lengths")
    parser.add_argument("--sigma", type=float, help="deviation of the logarithm of the lengths")
    parser.add_argument("--cap", type=int, help="longer answers are cut here")
    parser.add_argument("--groups", type=int, help="groups in a step")
    parser.add_argument("--group-size", type=int, help="answers in a group")
    parser.add_argument("--lag", type=int, default=1, help="bound of the lag (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="counted steps of each phase")
    parser.add_argument("--warmup", type=int, default=2, help="whole steps before (default: %(default)s)")
    parser.add_argument("--max-running", type=int, help="answers that an engine decodes at once")
    parser.add_argument("--microbatch", type=int, help="tokens of a microbatch")
    parser.add_argument("--bucket-mib", type=float, help="size of one broadcast")
    parser.add_argument("--stream", action="store_true", help="also T_stream: rollouts at lag 8, in a run of its own")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one run (default: %(default)s)")
    parser.add_argument("--quiet-s", type=float, default=60.0, help="wait for the engines before T_train, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"), help="models, prompts and run folders")
    parser.add_argument("--out", type=Path, help="JSON file that every result is appended to")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the configuration")
    args = parser.parse_args(argv)
    values = {k: getattr(args, k) if getattr(args, k) is not None else v for k, v in defaults(args.quick).items()}
    bucket_bytes = int(values.pop("bucket_mib") * 2**20)
    shape = args.shape or ("tiny" if args.quick else "0.6B")
    try:
        cases = [Case.parse(text) for text in (args.configs or f"{shape}@{args.split}").split(",")]
    except BadOption as error:
        parser.error(str(error))
    if values["steps"] < 1 or args.warmup < 1:
        parser.error("--steps and --warmup: at least 1 each")
    same = {k: getattr(args, k) for k in ("device", "lag", "warmup", "limit_s", "quiet_s", "seed", "stream")}
    work = args.work.absolute()
    return Options(**values, **same, bucket_bytes=bucket_bytes, work=work, overrides=args.set), cases, args.out


def defaults(quick: bool) -> dict[str, Any]:
    """Of the options that --quick changes."""
    return dict(QUICK if quick else NORMAL)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a case has no result."""
    options, cases, out = parse(argv)
    results = []
    for case in cases:
        result = measure(options, case)
        results.append(result)
        if out is not None:
            write(out, result)
        for key in ("error", "raw_error", "stream_error"):
            if key in result:
                say(f"{case}: {key}: {result[key]}")
    sys.stdout.write(tables(results) + "\n\n")
    sys.stdout.write(json.dumps(results[0] if len(results) == 1 else {"results": results}) + "\n")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
