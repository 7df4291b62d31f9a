"""Make the quick-start input on disk: a tiny Qwen3 that can almost sort six digits, and prompts for it.

`python -m examples.sort6 --out data/sort6 --seed 0` writes

    data/sort6/model/        Hugging Face folder: Qwen3, 102,784 parameters, float32, one token a character
    data/sort6/train.jsonl   {"prompt": "492013=", "answer": "012349"} a row
    data/sort6/eval.jsonl    the same, and no prompt of train.jsonl
    data/sort6/made.json     the arguments and the size of every file, written last

The warm-up is supervised: 250 steps on demonstrations of which half are right and half copy the input
unsorted. The sorting skill is therefore mostly in the warm-up; what reinforcement learning adds is the
choice between the two habits (sampled accuracy rises from about 0.3 to above 0.9).

The folder appears whole or not at all: everything is written beside it and renamed. The same arguments
give the same weights and prompts, bit by bit, on the same kind of processor; a complete folder of theirs stays.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from examples.folder import MakeError, make_folder, report_of, seed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FORMAT = 1
NUM_DIGITS = 6
NUM_PROMPTS = 10**NUM_DIGITS
NUM_HELD_OUT = 50_000
"""Numbers kept from training and warm-up; a fixed count, so that --eval-prompts does not change the model."""
SPECIAL = ("<pad>", "<eos>", "<unk>")
SYMBOLS = (*SPECIAL, *"0123456789", *"abcdefghijklmnopqrstuvwxyz", *"=+-*/,.:;? ")
VOCAB_SIZE = 64
PAD, EOS, UNK = range(3)
FIRST_DIGIT = SYMBOLS.index("0")
EQUALS = SYMBOLS.index("=")

SFT_STEPS = 250
SFT_BATCH = 128
SFT_LR = 3e-3
SFT_WARMUP_STEPS = 20
COPY_SHARE = 0.5
"""Share of demonstrations that copy the input instead of sorting it."""


def split_prompts(seed: int, train: int, evaluation: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the numbers behind the prompts: [train] and [evaluation] of them, all distinct.

    Raises:
        MakeError: fewer than one of either, or more than there are.
    """
    shuffled = shuffled_numbers(seed)
    held_out, rest = shuffled[:NUM_HELD_OUT], shuffled[NUM_HELD_OUT:]
    for flag, wanted, given in (("--train-prompts", train, rest), ("--eval-prompts", evaluation, held_out)):
        if not 1 <= wanted <= len(given):
            raise MakeError(f"{flag} {wanted}: give a number from 1 to {len(given)}")
    return rest[:train], held_out[:evaluation]


def shuffled_numbers(seed: int) -> NDArray[np.int64]:
    """[10^6] every number once; the first NUM_HELD_OUT are for evaluation alone."""
    return np.random.default_rng([seed, 0]).permutation(NUM_PROMPTS)


def to_digits(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] numbers below 10^6 to their [n, 6] decimal digits, leading zeros included."""
    return numbers[:, None] // 10 ** np.arange(NUM_DIGITS - 1, -1, -1) % 10


def rows(numbers: NDArray[np.int64]) -> Iterator[dict[str, str]]:
    """The JSONL rows of these numbers."""
    digits = to_digits(numbers)
    for given, answer in zip(digits, np.sort(digits, axis=1), strict=True):
        yield {"prompt": "".join(map(str, given)) + "=", "answer": "".join(map(str, answer))}


def demonstrations(seed: int) -> NDArray[np.int64]:
    """Token ids [SFT_STEPS, SFT_BATCH, 14] of the warm-up: six digits, `=`, six digits, end of sequence.

    They are drawn from the numbers that are not held out, so the evaluation prompts stay unseen.
    """
    rng = np.random.default_rng([seed, 3])
    count = SFT_STEPS * SFT_BATCH
    given = to_digits(rng.choice(shuffled_numbers(seed)[NUM_HELD_OUT:], size=count))
    answer = np.where(rng.random(count)[:, None] < COPY_SHARE, given, np.sort(given, axis=1))
    marks = [np.full(count, mark) for mark in (EQUALS, EOS)]
    tokens = np.column_stack([FIRST_DIGIT + given, marks[0], FIRST_DIGIT + answer, marks[1]])
    return tokens.reshape(SFT_STEPS, SFT_BATCH, -1)


def save_tokenizer(folder: Path, symbols: Sequence[str] = SYMBOLS, words: Sequence[str] = ()) -> None:
    """Write a tokenizer of one token a character, and one for each of the `words` among the symbols."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=64,
    ).save_pretrained(folder)


def build_model(seed: int, **sizes: int) -> "PreTrainedModel":
    """A Qwen3 with tied embeddings, float32, initialised from `seed`; 102,784 parameters unless `sizes` says more."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)  # two threads would save 2 s on a quiet machine and cost 7 s on a busy one
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    wanted = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 192} | sizes
    config = Qwen3Config(
        **wanted,
        vocab_size=VOCAB_SIZE,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


def losses(model: "PreTrainedModel", tokens: NDArray[np.int64]) -> Iterator["Tensor"]:
    """Of demonstrations [steps, batch, 14], one a step, of the answer's tokens alone."""
    import torch

    for batch in torch.from_numpy(tokens):
        answer = batch[:, NUM_DIGITS + 1 :]
        logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=answer.shape[1]).logits
        yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten())


def warm_up(model: "PreTrainedModel", of_steps: Iterator["Tensor"]) -> float:
    """Train on losses, one a step; returns the last. AdamW after a linear warm-up, gradients clipped at norm 1."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / SFT_WARMUP_STEPS))
    loss = torch.zeros(())
    model.train()
    for loss in of_steps:
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def fill(folder: Path, arguments: dict[str, int]) -> dict[str, Any]:
    """Write everything but made.json into an empty folder; returns what the closing line reports."""
    seed = arguments["seed"]
    split = split_prompts(seed, arguments["train_prompts"], arguments["eval_prompts"])
    for name, numbers in zip(("train.jsonl", "eval.jsonl"), split, strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows(numbers))
        (folder / name).write_text(text, encoding="utf-8")
    model = build_model(seed)
    started = time.perf_counter()
    loss = warm_up(model, losses(model, demonstrations(seed)))
    seconds = time.perf_counter() - started
    save_tokenizer(folder / "model")
    return {
        "parameters": save_model(model, folder / "model"),
        "sft_seconds": round(seconds, 2),
        "final_loss": round(loss, 6),
    }


def save_model(model: "PreTrainedModel", folder: Path) -> int:
    """Write a model into the folder that has its tokenizer; returns its parameters."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=True)
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which a rollout server of another user could not read
    return sum(parameter.numel() for parameter in model.parameters())


def make(
    out: Path, *, seed: int = 0, train_prompts: int = 20000, eval_prompts: int = 512
) -> tuple[dict[str, Any], bool]:
    """Make `out` unless it is there already; returns (report, whether it was made now).

    Raises:
        MakeError: `out` exists and is not a folder of this script, or the numbers of prompts make no sense.
    """
    arguments = {"format": FORMAT, "seed": seed, "train_prompts": train_prompts, "eval_prompts": eval_prompts}
    return make_folder(out, arguments, lambda folder: fill(folder, arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m examples.sort6", description="Make the quick-start input.")
    parser.add_argument("--out", type=Path, default=Path("data/sort6"), help="folder to make (default: %(default)s)")
    for flag, kind, default in (("--seed", seed, 0), ("--train-prompts", int, 20000), ("--eval-prompts", int, 512)):
        parser.add_argument(flag, type=kind, default=default, help="default: %(default)s")
    args = parser.parse_args(argv)
    made = partial(make, args.out, seed=args.seed, train_prompts=args.train_prompts, eval_prompts=args.eval_prompts)
    return report_of("sort6", args.out, {"model": str(args.out / "model")}, made)


if __name__ == "__main__":
    sys.exit(main())
