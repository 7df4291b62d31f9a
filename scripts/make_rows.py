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
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from examples.folder import MakeError, make_folder, report_of

FORMAT = 1
DRAWN_AT_ONCE = 500
MAX_IN_VAIN = 20_000
"""Rows in a row of questions that are held back, after which a family is thought to have no other."""
Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_rows", description="Write prompts of reasoning-gym.")
    parser.add_argument("family", help="chain_sum, spell_backward, gsm_symbolic, ... of reasoning-gym")
    parser.add_argument("--out", type=Path, help="folder to make (default: data/FAMILY)")
    parser.add_argument("--options", default="", help="the family's own, such as 'min_terms=2&max_digits=1'")
    for flag, default in (("--seed", 0), ("--train-prompts", 8000), ("--eval-prompts", 512)):
        parser.add_argument(flag, type=int, default=default, help="default: %(default)s")
    args = parser.parse_args(argv)
    options = {key: yaml.safe_load(value) for key, value in parse_qsl(args.options, strict_parsing=bool(args.options))}
    out = args.out or Path("data") / args.family
    sizes = {"seed": args.seed, "train_prompts": args.train_prompts, "eval_prompts": args.eval_prompts}
    return report_of("make_rows", out, {"rows": str(out)}, partial(make, out, args.family, options, **sizes))


def make(
    out: Path, family: str, options: dict[str, Any], *, seed: int, train_prompts: int, eval_prompts: int
) -> tuple[dict[str, Any], bool]:
    """Make `out` unless it is there already; returns (report, whether it was made now).

    Raises:
        MakeError: no such family, options that it refuses, fewer questions than the evaluation wants, or `out` is not
            a folder of this script.
    """
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError as error:
        raise MakeError("reasoning-gym is not installed; run `pip install 'slipstream-rl[recipes]'`") from error
    wanted = {"family": family, "options": options, "seed": seed, "reasoning_gym": version}
    wanted |= {"format": FORMAT, "train_prompts": train_prompts, "eval_prompts": eval_prompts}

    def fill(folder: Path) -> dict[str, Any]:
        held_back, rows = split(draw(family, options, seed), eval_prompts, train_prompts)
        if len(rows) < train_prompts:
            raise MakeError(
                f"--eval-prompts {eval_prompts}: {family} with {options} has no more than {len(held_back)} questions,"
                " which leaves none to train on; take fewer"
            )
        for name, part in (("eval.jsonl", held_back), ("train.jsonl", rows)):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        questions = len({row["question"] for row in rows})
        return {"train_prompts": len(rows), "train_questions": questions, "eval_prompts": len(held_back)}

    return make_folder(out, wanted, fill)


def split(drawn: Iterator[dict[str, Any]], evaluation: int, train: int) -> tuple[Rows, Rows]:
    """The first `evaluation` different questions, and then `train` rows of others, as often as they are drawn."""
    held_back: dict[str, dict[str, Any]] = {}
    rows: Rows = []
    in_vain = 0
    for row in drawn:
        in_vain += 1
        if row["question"] not in held_back:
            if len(held_back) < evaluation:
                held_back[row["question"]] = row
            else:
                rows.append(row)
            in_vain = 0
        if len(rows) == train or in_vain == MAX_IN_VAIN:
            break
    return list(held_back.values()), rows


def draw(family: str, options: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of a family without end. Raises MakeError: the family refuses its options."""
    import reasoning_gym

    for number in itertools.count():
        try:
            # The package draws row i of seed s as row i - 1 of seed s + 1: the draws must lie apart.
            entries = reasoning_gym.create_dataset(
                family, size=DRAWN_AT_ONCE, seed=seed * 1_000_003 + number * DRAWN_AT_ONCE, **options
            )
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # how families refuse options
            raise MakeError(f"{family} with {options}: {type(error).__name__}: {error}") from error
        for entry in entries:
            yield {"question": entry["question"], "answer": str(entry["answer"])}


if __name__ == "__main__":
    sys.exit(main())
