"""`python -m examples.random_qwen3 SHAPE FOLDER`: a Qwen3 or Qwen3-MoE folder of random weights, and prompts for it.

Speed, memory and broadcasts do not depend on the values of weights: to try a shape on GPUs needs no download.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHARD = "2GB"
MAX_TOKENS = 40_960
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
PAD, EOS, UNK = range(3)
COLUMNS = ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
COLUMNS += ["head_dim", "vocab_size", "tie_word_embeddings"]
THIRTY = {"hidden_size": 2048, "num_key_value_heads": 4, "intermediate_size": 6144, "tie_word_embeddings": False}
SMALL = {"num_hidden_layers": 12, "num_key_value_heads": 4, "vocab_size": 32_000, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    name: {"model_type": "qwen3", **dict(zip(COLUMNS, sizes, strict=True))}
    for name, *sizes in (
        ("tiny", 64, 2, 192, 4, 2, 16, 512, True),
        ("10M", 320, 7, 960, 5, 5, 64, 4096, True),
        ("85M", 640, 12, 2560, 10, 5, 64, 16_384, True),
        ("0.6B", 1024, 28, 3072, 16, 8, 128, 151_936, True),
        ("1.7B", 2048, 28, 6144, 16, 8, 128, 151_936, True),
        ("4B", 2560, 36, 9728, 32, 8, 128, 151_936, True),
        ("8B", 4096, 36, 12_288, 32, 8, 128, 151_936, False),
    )
}
"""Sizes of Qwen3 decoders, in the words of transformers."""
MIXTURE = {"model_type": "qwen3_moe", "norm_topk_prob": True}
EXPERT_COLUMNS = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
SHAPES |= {
    name: SHAPES[base] | changes | MIXTURE | dict(zip(EXPERT_COLUMNS, experts, strict=True))
    for name, base, changes, *experts in (
        ("tiny-moe", "tiny", {}, 8, 2, 48),
        ("3B-A0.6B", "1.7B", SMALL, 64, 8, 512),
        *(
            (f"30B-A3B{end}", "4B", {**THIRTY, "num_hidden_layers": layers}, 128, 8, 768)
            for end, layers in (("", 48), ("-4L", 4), ("-8L", 8))
        ),
    )
}
"""Mixtures of experts: of Qwen3-30B-A3B also its first layers, which one GPU trains."""


def config(name: str) -> Any:
    """The transformers configuration of a shape."""
    from transformers import AutoConfig

    kind = "Qwen3MoeForCausalLM" if "num_experts" in SHAPES[name] else "Qwen3ForCausalLM"
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    sizes = SHAPES[name] | {"max_position_embeddings": MAX_TOKENS}
    return AutoConfig.for_model(**sizes, **tokens, architectures=[kind], dtype="bfloat16")


def write_weights(folder: Path, shape: str, seed: int) -> None:
    """config.json and all weights in bfloat16, as transformers draws them: normal of deviation 0.02, norms of one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        built = AutoModelForCausalLM.from_config(config(shape), dtype=torch.bfloat16)
    built.save_pretrained(folder, max_shard_size=SHARD)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One word is one token: `w17` is id 17. So a prompt of n words has n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *(f"w{i}" for i in range(len(SPECIAL), vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"clean_up_tokenization_spaces": False, "model_max_length": MAX_TOKENS}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, **settings).save_pretrained(folder)


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
    beside = out.with_name(f".{out.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_weights(beside, name, seed)
    write_tokenizer(beside, SHAPES[name]["vocab_size"])
    beside.rename(out)
    return True


if __name__ == "__main__":
    # in a process of its own, so that the memory it takes on a GPU is free again when it has ended
    make(sys.argv[1], Path(sys.argv[2]), 0)
