"""Make the input of the two-turn example: a tiny Qwen3 that sometimes asks a calculator, and sums for it.

`python -m examples.calculator --out data/calculator --seed 0` writes

    data/calculator/model/        Qwen3 of 102,784 parameters with a chat template; a tool call's frame is one token
    data/calculator/train.jsonl   {"prompt": [{"role": "user", "content": "48+27"}], "answer": "75"} a row
    data/calculator/eval.jsonl    the same, and no prompt of train.jsonl
    data/calculator/made.json     the arguments and the size of every file, written last

The warm-up is supervised, on demonstrations of which a quarter calls the tool and repeats what it says; the others
guess a number. What reinforcement learning adds is the choice: only a trajectory of two turns is mostly right. The
model is too small to add.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from examples import sort6
from examples.folder import make_folder, report_of, seed
from examples.sort6 import EOS, PAD, SPECIAL

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
END = '"}}</tool_call>'
ROLES = ("<user>", "<tool>", "<assistant>")
SYMBOLS = (*SPECIAL, *ROLES, CALL, END, *"0123456789", *"+-*.")
IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
LIMIT = 100
"""Summands are below it."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEPS, BATCH = 400, 128
TOOL_SHARE = 0.25
"""Share of demonstrations that call the tool."""
HELD_OUT = 512
IGNORED = -100


def pairs(seed: int) -> NDArray[np.int64]:
    """[LIMIT^2, 2] all pairs of summands; the first HELD_OUT are for evaluation alone."""
    numbers = np.random.default_rng([seed, 0]).permutation(LIMIT**2)
    return np.stack((numbers // LIMIT, numbers % LIMIT), axis=1)


def row(pair: NDArray[np.int64]) -> dict[str, Any]:
    """The JSONL row of two summands."""
    a, b = pair.tolist()
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)}


def encode(text: str) -> list[int]:
    return [IDS[symbol] for symbol in text]


def demonstration(a: int, b: int, guess: int | None) -> tuple[list[int], list[int]]:
    """(token ids, labels): only what the assistant says is learnt. Without a guess it calls the tool."""
    asked = [IDS["<user>"], *encode(f"{a}+{b}"), IDS["<assistant>"]]
    if guess is not None:
        said = [*encode(str(guess)), EOS]
        return asked + said, [IGNORED] * len(asked) + said
    call = [IDS[CALL], *encode(f"{a}+{b}"), IDS[END], EOS]
    told = [IDS["<tool>"], *encode(str(a + b)), IDS["<assistant>"]]
    said = [*encode(str(a + b)), EOS]
    return asked + call + told + said, [IGNORED] * len(asked) + call + [IGNORED] * len(told) + said


def demonstrations(seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and labels, both [STEPS, BATCH, L], padded at the end; no pair of the evaluation."""
    rng = np.random.default_rng([seed, 3])
    count, known = STEPS * BATCH, pairs(seed)[HELD_OUT:]
    chosen, guesses = known[rng.integers(len(known), size=count)], rng.integers(2 * LIMIT - 1, size=count)
    calls = rng.random(count) < TOOL_SHARE
    made = [
        demonstration(int(a), int(b), None if call else int(guess))
        for (a, b), guess, call in zip(chosen, guesses, calls, strict=True)
    ]
    longest = max(len(ids) for ids, _ in made)
    tokens = np.array([ids + [PAD] * (longest - len(ids)) for ids, _ in made])
    labels = np.array([ids + [IGNORED] * (longest - len(ids)) for _, ids in made])
    return tokens.reshape(STEPS, BATCH, -1), labels.reshape(STEPS, BATCH, -1)


def losses(model: "PreTrainedModel", tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> Iterator["Tensor"]:
    """Of demonstrations, one a step."""
    import torch

    for ids, wanted in zip(torch.from_numpy(tokens), torch.from_numpy(labels), strict=True):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORED)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a character, a role, and each half of a tool call's frame."""
    sort6.save_tokenizer(folder, SYMBOLS, (*ROLES, CALL, END))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def fill(folder: Path, arguments: dict[str, int]) -> dict[str, Any]:
    """Write everything but made.json into an empty folder."""
    seed = arguments["seed"]
    known = pairs(seed)
    for name, chosen in (("train.jsonl", known[HELD_OUT:]), ("eval.jsonl", known[:HELD_OUT])):
        (folder / name).write_text("".join(json.dumps(row(pair)) + "\n" for pair in chosen), encoding="utf-8")
    model = sort6.build_model(seed)
    loss = sort6.warm_up(model, losses(model, *demonstrations(seed)))
    save_tokenizer(folder / "model")
    return {"parameters": sort6.save_model(model, folder / "model"), "final_loss": round(loss, 6)}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m examples.calculator", description=(__doc__ or "")[:80])
    parser.add_argument("--out", type=Path, default=Path("data/calculator"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    args = parser.parse_args(argv)
    arguments = {"format": sort6.FORMAT, "seed": args.seed}
    make = partial(make_folder, args.out, arguments, partial(fill, arguments=arguments))
    return report_of("calculator", args.out, {"model": str(args.out / "model")}, make)


if __name__ == "__main__":
    sys.exit(main())
