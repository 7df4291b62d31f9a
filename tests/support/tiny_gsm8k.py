r"""A folder with a model of 100,000 parameters that answers `\boxed{4}` with any digit, and rows in GSM8K's columns."""

import json
from pathlib import Path

from examples.random_qwen3 import config

SYMBOLS = (
    "<pad>",
    "<eos>",
    "<unk>",
    "\\boxed{",
    "}",
    "#### ",
    *"0123456789",
    *"+-*/=?., ",
    *"abcdefghijklmnopqrstuvwxyz",
)
PAD, EOS, UNK = range(3)
BOX, CLOSE, ZERO = SYMBOLS.index("\\boxed{"), SYMBOLS.index("}"), SYMBOLS.index("0")
PROMPT_TOKENS = 12
WARM_UP_STEPS = 80
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def make(folder: Path) -> None:
    """Write model/, train.jsonl and test.jsonl."""
    for name, numbers in (("train", range(60)), ("test", range(60, 70))):
        rows = [{"question": f"{n % 7} + {n % 3} = ?", "answer": f"sum\n#### {n % 7 + n % 3}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_tokenizer(folder / "model")
    _write_model(folder / "model")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token=SYMBOLS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|#### |."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": SYMBOLS[PAD], "eos_token": SYMBOLS[EOS], "unk_token": SYMBOLS[UNK]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names).save_pretrained(folder)


def _write_model(folder: Path) -> None:
    """Supervised for a few seconds: a box with a digit, whatever is asked."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings = config("tiny")
    settings.dtype = "float32"
    model = Qwen3ForCausalLM(settings).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(WARM_UP_STEPS):
        asked = torch.randint(ZERO, len(SYMBOLS), (64, PROMPT_TOKENS))
        digits = torch.randint(ZERO, ZERO + 10, (64, 1))
        marks = [torch.full((64, 1), mark) for mark in (BOX, CLOSE, EOS)]
        tokens = torch.cat([asked, marks[0], digits, marks[1], marks[2]], dim=1)
        logits = model(input_ids=tokens[:, PROMPT_TOKENS // 2 : -1]).logits[:, -4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -4:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=True)
    model.save_pretrained(folder)
