"""Write prompts of a reasoning-gym family to JSONL files, none of the evaluation's among those of training.

`python -m scripts.make_rows chain_sum --out data/chain_sum --options "min_terms=2&max_terms=2&max_digits=2"` writes

    data/chain_sum/train.jsonl   {"question": ..., "answer": ...} a row
    data/chain_sum/eval.jsonl    the same, each question once, and none of them in train.jsonl
    data/chain_sum/made.json     the arguments and the size of every file, written last

The evaluation gets the first questions that are drawn. Small families have few, which come again and again in training:
one-digit sums of two terms are 200. The folder appears whole or not at all; a complete one stays. It needs the package
`reasoning-gym` (extra `recipes`).
"""

import argparse
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from examples.folder import MakeError, make_folder, report_of

FORMAT = 1
DRAWN_AT_ONCE = 500
MAX_IN_VAIN = 20_000
"""Rows in a row of questions that are held back, after which a family is thought to have no other."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_rows", description="Write prompts of reasoning-gym.")
    parser.add_argument("family", help="chain_sum, spell_backward, gsm_symbolic, ... of reasoning-gym")
    parser.add_argument("--out", type=Path, help="folder to make (default: data/FAMILY)")
    parser.add_argument("--options", default="", help="the family's own, such as 'min_terms=2&max_digits=1'")
    for flag, default in (("--seed", 0), ("--train-prompts", 8000), ("--eval-prompts", 512)):
        parser.add_argument(flag, type=int, default=default, help="default: %(default)s")
    args = parser.parse_args(argv)
    out = args.out or Path("data") / args.family
    options = {key: yaml.safe_load(value) for key, value in parse_qsl(args.options, strict_parsing=bool(args.options))}

    def make() -> tuple[dict[str, Any], bool]:
        try:
            version = importlib.metadata.version("reasoning-gym")
        except importlib.metadata.PackageNotFoundError as error:
            raise MakeError("reasoning-gym is not installed; run `pip install 'slipstream-rl[recipes]'`") from error
        sizes = {name: getattr(args, name) for name in ("family", "seed", "train_prompts", "eval_prompts")}
        wanted = {**sizes, "options": options, "reasoning_gym": version, "format": FORMAT}
        return make_folder(out, wanted, lambda folder: fill(folder, args, options))

    return report_of("make_rows", out, {"rows": str(out)}, make)


def fill(folder: Path, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """The first different questions for the evaluation, and then rows of others, as often as they are drawn.

    Raises MakeError: no such family, options that it refuses, or no more questions than the evaluation wants.
    """
    held_back: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    in_vain = 0
    for row in draw(args.family, options, args.seed):
        in_vain += 1
        if row["question"] not in held_back:
            in_vain = 0
            if len(held_back) < args.eval_prompts:
                held_back[row["question"]] = row
            else:
                rows.append(row)
        if len(rows) == args.train_prompts or in_vain == MAX_IN_VAIN:
            break
    if len(rows) < args.train_prompts:
        raise MakeError(
            f"--eval-prompts {args.eval_prompts}: {args.family} with {options} has no more than {len(held_back)}"
            " questions, which leaves none to train on; take fewer"
        )
    for name, part in (("eval.jsonl", held_back.values()), ("train.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    questions = len({row["question"] for row in rows})
    return {"train_prompts": len(rows), "train_questions": questions, "eval_prompts": len(held_back)}


def draw(family: str, options: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of a family without end. Raises MakeError: the family refuses its options."""
    import reasoning_gym

    for number in itertools.count():
        # The package draws row i of seed s as row i - 1 of seed s + 1: the draws must lie apart.
        drawn = {"size": DRAWN_AT_ONCE, "seed": seed * 1_000_003 + number * DRAWN_AT_ONCE}
        try:
            entries = reasoning_gym.create_dataset(family, **drawn, **options)
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # how families refuse options
            raise MakeError(f"{family} with {options}: {type(error).__name__}: {error}") from error
        for entry in entries:
            yield {"question": entry["question"], "answer": str(entry["answer"])}


if __name__ == "__main__":
    sys.exit(main())
