"""`python -m scripts.prepare_verifiers ID --out data/ID`: tasks of a verifiers taskset (extra `verifiers`) as rows.

ID is an installed taskset of verifiers 0.4, `--options "{split: train}"` its own settings. Each row has a prompt and,
in the column `task`, the whole task, so that environment.function `verifiers` plays it and nothing is loaded twice. The
first `--eval-rows` tasks become eval.jsonl, the next `--rows` train.jsonl.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.prepare_gsm8k import write

UNUSABLE = (ImportError, AttributeError, TypeError, ValueError, OSError, yaml.YAMLError)


def rows_of(tasks: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """A row for each task. The prompt is what a policy sees first, as messages of text."""
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        messages = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
        first = data.get("prompt") or data.get("name") or "(the environment begins)"
        if isinstance(first, str):
            first = [{"role": "user", "content": first}]
        messages += [{"role": one["role"], "content": str(one.get("content") or "")} for one in first]
        yield {"prompt": messages, "task": data}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.prepare_verifiers", description=__doc__)
    parser.add_argument("taskset", help="id of an installed taskset")
    parser.add_argument("--options", default="{}", help="the taskset's own, in YAML: '{split: train}'")
    parser.add_argument("--rows", type=int, default=10_000, help="most rows of train.jsonl (default: %(default)s)")
    parser.add_argument("--eval-rows", type=int, default=256, help="rows of eval.jsonl (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: data/ID")
    args = parser.parse_args(argv)
    out = args.out or Path("data") / args.taskset.rpartition("/")[2]
    try:
        import verifiers.v1 as vf

        options = yaml.safe_load(args.options) or {}
        config = vf.taskset_config_type(args.taskset).model_validate({**options, "id": args.taskset})
        tasks = iter(vf.load_taskset(config))
        for name, most in (("eval", args.eval_rows), ("train", args.rows)):
            count = write(rows_of(itertools.islice(tasks, most)), out / f"{name}.jsonl")
            sys.stdout.write(f"{out / name}.jsonl: {count} rows\n")
            if not count and most:
                raise ValueError("the taskset had no task left for it; lower --eval-rows, which come first")
    except UNUSABLE as error:
        sys.stderr.write(f"prepare_verifiers: {args.taskset}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
