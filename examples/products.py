"""Make the input of the cold-start example: an untrained Qwen3, demonstrations, and products of three numbers.

`python -m examples.products --out data/products --seed 0` writes

    data/products/model/        Qwen3 of 599,104 parameters, random, with the chat template of examples.calculator
    data/products/sft.jsonl     {"messages": [...]} a row: a question, and one answer with the calculator or a guess
    data/products/train.jsonl   {"prompt": [{"role": "user", "content": "48*27*6"}], "answer": "7776"} a row
    data/products/eval.jsonl    the same; none of its products is in the other files
    data/products/made.json     the arguments and the size of every file, written last

An untrained model calls no tool, so rewards would be 0 for ever. Supervised fine-tuning (learner.objective=sft) shows
it both habits, the rarer one with the tool; reinforcement learning then chooses (docs/howto/sft.md).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples import calculator, sort6
from examples.calculator import CALL, END
from examples.folder import make_folder, report_of, seed

FORMAT = 1
LEAST, LIMIT = 2, 100
"""Factors are from LEAST to below LIMIT."""
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 384, "head_dim": 32}
DEMONSTRATIONS, PROMPTS, HELD_OUT = 40_000, 20_000, 256
TOOL_SHARE = 0.3
"""Share of demonstrations that call the tool and repeat what it says; the others say a number of about that length."""


def factors(seed: int) -> NDArray[np.int64]:
    """[n, 3] products, all different; the first HELD_OUT are for evaluation, the next PROMPTS for training."""
    span = LIMIT - LEAST
    numbers = np.random.default_rng([seed, 0]).choice(span**3, HELD_OUT + PROMPTS + DEMONSTRATIONS, replace=False)
    return np.stack((numbers // span**2, numbers // span % span, numbers % span), axis=1) + LEAST


def asked(three: NDArray[np.int64]) -> str:
    return "*".join(map(str, three.tolist()))


def row(three: NDArray[np.int64]) -> dict[str, Any]:
    """The JSONL row of a prompt."""
    return {"prompt": [{"role": "user", "content": asked(three)}], "answer": str(three.prod())}


def demonstration(three: NDArray[np.int64], guess: int | None) -> dict[str, Any]:
    """The JSONL row of a conversation. Without a guess it calls the tool."""
    said = [("user", asked(three))]
    if guess is None:
        said += [("assistant", f"{CALL}{asked(three)}{END}"), ("tool", str(three.prod()))]
    said.append(("assistant", str(three.prod() if guess is None else guess)))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def demonstrations(seed: int) -> list[dict[str, Any]]:
    """All of them; no product of the evaluation or of the prompts."""
    rng, known = np.random.default_rng([seed, 1]), factors(seed)[HELD_OUT + PROMPTS :]
    guesses = (10 ** rng.uniform(1, 6, len(known))).astype(np.int64)
    calls = rng.random(len(known)) < TOOL_SHARE
    made = zip(known, guesses.tolist(), calls.tolist(), strict=True)
    return [demonstration(three, None if call else guess) for three, guess, call in made]


def fill(folder: Path, arguments: dict[str, int]) -> dict[str, Any]:
    """Write everything but made.json into an empty folder."""
    known = factors(arguments["seed"])
    parts = {
        "sft": demonstrations(arguments["seed"]),
        "train": map(row, known[HELD_OUT : HELD_OUT + PROMPTS]),
        "eval": map(row, known[:HELD_OUT]),
    }
    for name, rows in parts.items():
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    calculator.save_tokenizer(folder / "model")
    return {"parameters": sort6.save_model(sort6.build_model(arguments["seed"], **SIZES), folder / "model")}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m examples.products", description=(__doc__ or "")[:80])
    parser.add_argument("--out", type=Path, default=Path("data/products"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    args = parser.parse_args(argv)
    arguments = {"format": FORMAT, "seed": args.seed}
    make = partial(make_folder, args.out, arguments, partial(fill, arguments=arguments))
    return report_of("products", args.out, {"model": str(args.out / "model")}, make)


if __name__ == "__main__":
    sys.exit(main())
