"""Make the input of the example with pictures: a tiny random Qwen2-VL, and pictures of one colour to name.

`python -m examples.pictures --out data/pictures --seed 0` writes

    data/pictures/model/         Qwen2-VL of random weights, with tokenizer, image processor and chat template
    data/pictures/pictures/      PNG files of several sizes
    data/pictures/eval.jsonl     the same about pictures that are not in training
    data/pictures/train.jsonl    {"prompt": [a user message with `<image>`], "images": [path], "answer": colour} a row
    data/pictures/made.json      the arguments and the size of every file, written last

Nothing is downloaded. A colour ends an answer; at first every token is as likely as any other.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from examples.folder import make_folder, report_of, seed

FORMAT = 1
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}
SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SYMBOLS = (*SPECIAL, *VISION, "which", "colour", "is", "this", "?", *COLOURS)
IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<assistant> ' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %} <assistant>{% endif %}"
)
PATCH = 4
HELD_OUT = 32
SIDES = (16, 24, 33)
"""Of pictures, in pixels; the processor makes them multiples of 8."""


def model_config(family: str = "qwen2_vl", *, tied: bool = True, patch: int = PATCH) -> Any:
    """The configuration of the tiny model, `qwen2_vl` or `qwen2_5_vl`; `patch` are pixels along a side of a patch."""
    from transformers import Qwen2_5_VLConfig, Qwen2VLConfig

    text = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": IDS["<eos>"],
        "pad_token_id": IDS["<pad>"],
    }
    tower: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "in_channels": 3, "in_chans": 3}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, (IDS[symbol] for symbol in VISION), strict=True))
    if family == "qwen2_vl":
        sizes = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=text, vision_config=tower | sizes, tie_word_embeddings=tied, **ids)
    sizes = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 4 * patch}
    sizes |= {"fullatt_block_indexes": [1]}  # type: ignore[dict-item]
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower | sizes, tie_word_embeddings=tied, **ids)


def save_model(folder: Path, seed: int, family: str = "qwen2_vl", *, tied: bool = True, patch: int = PATCH) -> int:
    """Write a model of random weights with all that belongs to it; returns its parameters."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(model_config(family, tied=tied, patch=patch), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the usual 0.02, so that a picture is seen in the logits
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    # a colour ends an answer, so that one of 18 answers is right before anything is learnt
    ends = [IDS["<eos>"], *(IDS[colour] for colour in COLOURS)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=IDS["<pad>"], do_sample=True)
    model.save_pretrained(folder)
    limits = {"min_pixels": (4 * patch) ** 2, "max_pixels": (16 * patch) ** 2}
    Qwen2VLImageProcessorPil(patch_size=patch, **limits).save_pretrained(folder)
    save_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token a word, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))  # a symbol
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in (*SPECIAL, *VISION)])
    special = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=512, **special
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def save_pictures(folder: Path, count: int, seed: int, *, name: str = "") -> list[dict[str, Any]]:
    """Write so many PNG files of one colour with some noise, called `name` and a number; the rows that ask for them."""
    from PIL import Image

    rng, names = np.random.default_rng(seed), list(COLOURS)
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for number in range(count):
        colour = names[number % len(names)]
        height, width = rng.choice(SIDES, size=2).tolist()
        noise = rng.integers(-25, 26, size=(height, width, 3))
        pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{name}{number}.png")
        asked = {"role": "user", "content": "<image> which colour is this ?"}
        rows.append({"prompt": [asked], "images": [f"pictures/{name}{number}.png"], "answer": colour})
    return rows


def fill(folder: Path, arguments: dict[str, int]) -> dict[str, Any]:
    """Write everything but made.json into an empty folder."""
    count, seed = arguments["count"], arguments["seed"]
    for file, rows in (
        ("train.jsonl", save_pictures(folder, count, seed)),
        ("eval.jsonl", save_pictures(folder, HELD_OUT, seed + 1, name="eval-")),
    ):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    parameters = save_model(folder / "model", seed)
    return {"parameters": parameters, "pictures": count + HELD_OUT}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m examples.pictures", description=(__doc__ or "")[:80])
    parser.add_argument("--out", type=Path, default=Path("data/pictures"), help="folder (default: %(default)s)")
    parser.add_argument("--count", type=int, default=64, help="pictures (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    args = parser.parse_args(argv)
    arguments = {"format": FORMAT, "seed": args.seed, "count": args.count}
    make = partial(make_folder, args.out, arguments, lambda folder: fill(folder, arguments))
    return report_of("pictures", args.out, {"model": str(args.out / "model")}, make)


if __name__ == "__main__":
    sys.exit(main())
