"""`python -m scripts.bench.random_model --shape 8B --out DIR`: a Qwen3 folder of random weights, and prompts for it.

Speed, memory and broadcasts do not depend on the values of weights; so a benchmark needs none that were trained.
The weights are drawn and written in bfloat16, shard by shard: 16 GB in well under a minute on a machine with a GPU.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2_000_000_000
STD = 0.02
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD, EOS, UNK = range(3)
WRITERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 decoder."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool


SHAPES = {
    "tiny": Shape(hidden=64, layers=2, intermediate=192, heads=4, kv_heads=2, head_dim=16, vocab=512, tied=True),
    "10M": Shape(hidden=320, layers=7, intermediate=960, heads=5, kv_heads=5, head_dim=64, vocab=4096, tied=True),
    "0.6B": Shape(
        hidden=1024, layers=28, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151_936, tied=True
    ),
    "1.7B": Shape(
        hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8, head_dim=128, vocab=151_936, tied=True
    ),
    "8B": Shape(
        hidden=4096, layers=36, intermediate=12_288, heads=32, kv_heads=8, head_dim=128, vocab=151_936, tied=False
    ),
}

Layout = dict[str, tuple[int, ...]]
"""Shape of each tensor by its name in the file."""


def layout(shape: Shape) -> Layout:
    """Every tensor of the model, in the order of the model."""
    h, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: Layout = {"model.embed_tokens.weight": (shape.vocab, h)}
    for i in range(shape.layers):
        parts: Layout = {
            "self_attn.q_proj": (wide, h),
            "self_attn.k_proj": (narrow, h),
            "self_attn.v_proj": (narrow, h),
            "self_attn.o_proj": (h, wide),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "mlp.gate_proj": (shape.intermediate, h),
            "mlp.up_proj": (shape.intermediate, h),
            "mlp.down_proj": (h, shape.intermediate),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": size for name, size in parts.items()}
    tensors["model.norm.weight"] = (h,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab, h)
    return tensors


def num_bytes(size: tuple[int, ...]) -> int:
    """Of a tensor in bfloat16."""
    return 2 * int(np.prod(size, dtype=np.int64))


def shards(tensors: Layout) -> Iterator[Layout]:
    """Cut into files of at most SHARD_BYTES (a larger tensor has one for itself)."""
    shard: Layout = {}
    size = 0
    for name, dimensions in tensors.items():
        if shard and size + num_bytes(dimensions) > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = dimensions
        size += num_bytes(dimensions)
    yield shard


def draw(name: str, size: tuple[int, ...], device: "torch.device", seed: int) -> "torch.Tensor":
    """One tensor in bfloat16 in host memory: ones for norms, else normal of deviation 0.02."""
    import torch

    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, STD, generator=generator).cpu()


def write_shard(path: Path, shard: Layout, device: "torch.device", first_seed: int) -> None:
    """One safetensors file: eight bytes of header length, the header, the tensors. Writing lets other threads run."""
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in shard.items():
        end = offset + num_bytes(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, size) in enumerate(shard.items()):
            tensor = draw(name, size, device, first_seed + number)
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            while data:  # one write takes at most 2 GiB
                data = data[file.write(data) :]


def write_weights(folder: Path, shape: Shape, seed: int) -> None:
    """All files and their index."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = list(shards(layout(shape)))
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(WRITERS) as pool:
        written = [
            pool.submit(write_shard, folder / name, part, device, seed + 100_000 * number)
            for number, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        for one in written:
            one.result()
    index = {
        "metadata": {"total_size": sum(num_bytes(size) for part in parts for size in part.values())},
        "weight_map": {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_config(folder: Path, shape: Shape) -> None:
    """config.json, as this installation's transformers writes it."""
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=40_960,
        tie_word_embeddings=shape.tied,
        architectures=["Qwen3ForCausalLM"],
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="bfloat16",
    ).save_pretrained(folder)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One word is one token: `w17` is id 17. So a prompt of n words has n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        clean_up_tokenization_spaces=False,
        model_max_length=40_960,
    ).save_pretrained(folder)


def write_prompts(path: Path, *, vocab: int, count: int, num_tokens: int, seed: int) -> None:
    """`count` rows of `num_tokens` random words each; no two share a prefix that a cache could serve."""
    ids = np.random.default_rng(seed).integers(len(SPECIAL), vocab, size=(count, num_tokens))
    with path.open("w", encoding="utf-8") as file:
        for row in ids.tolist():
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in row), "answer": ""}) + "\n")


def make(name: str, out: Path, seed: int) -> bool:
    """Write the folder unless it is there; False when it was. It appears whole or not at all."""
    if (out / "config.json").is_file():
        return False
    beside = out.with_name(f".{out.name}.{os.getpid()}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        write_weights(beside, SHAPES[name], seed)
        write_tokenizer(beside, SHAPES[name].vocab)
        write_config(beside, SHAPES[name])
        try:
            beside.rename(out)
        except OSError:  # another process was faster; its folder is as good
            if not (out / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True


def main() -> int:
    """Entry point. A process of its own, so that the memory it takes on a GPU is free again when it has ended."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.random_model", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to make; left alone if it is there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made = make(args.shape, args.out, args.seed)
    sys.stdout.write(f"{args.out}: {'made' if made else 'there already'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
