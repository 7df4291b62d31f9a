"""Checks of reward.model.path, and the model's GPU memory. Imports no torch."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import InputMissing
from configs.plan import Plan, ranges
from configs.schema import Config
from learner.launch.weight_files import check_safetensors, header_of
from replay.fingerprint import FingerprintError, resolve_chat_template
from replay.prompts import read_rows

KEY = "reward.model.path"
HEAD = "ForSequenceClassification"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAMPLED_ROWS = 64
GIB = 1024**3


def check_reward_model(config: Config, *, has_data: bool = True) -> None:
    """Check the folder by its files' headers, and against the prompts where they are.

    Raises:
        ConfigError: no folder, no model with one label, weights or tokenizer missing, or no chat template for a prompt
            of chat messages.
    """
    model = config.reward.model
    if model.path is None:
        return
    folder = Path(model.path)
    if not folder.is_dir():
        raise InputMissing(
            f"{KEY}: no folder {model.path!r}; give the Hugging Face folder of a sequence classification model with one"
            " label (a model of a hub is downloaded first)"
        )
    _check_config(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputMissing(
            f"{KEY}: {model.path!r} has no *.safetensors file; save the model with save_pretrained, or copy the folder"
            " again"
        )
    for file in weights:
        check_safetensors(file, KEY)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise InputMissing(f"{KEY}: {model.path!r} has no tokenizer; save the reward model's tokenizer into it")
    _check_template(config, has_data=has_data)


def _check_config(folder: Path) -> None:
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputMissing(f"{KEY}: {file} is not readable as JSON ({error}); copy the model folder again") from error
    names = settings.get("architectures") or []
    if not any(str(name).endswith(HEAD) for name in names):
        raise InputMissing(
            f"{KEY}: {file} names the architecture {', '.join(map(str, names)) or 'of nothing'}, which has no head for"
            f" a score; give a folder of ...{HEAD}, saved with num_labels=1"
        )
    labels = len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels", 2)
    if labels != 1:
        raise InputMissing(
            f"{KEY}: {file} has {labels} labels (id2label), and a scalar reward model has 1; train or convert it with"
            " num_labels=1"
        )


def _check_template(config: Config, *, has_data: bool) -> None:
    """Messages need a chat template. Broken rows are named when the file is read."""
    path = str(config.reward.model.path)
    try:
        template = resolve_chat_template(path, config.reward.model.chat_template, "reward.model.chat_template")
    except FingerprintError as error:
        raise InputMissing(str(error)) from error
    files = [*(one.path for one in config.data.train_sets.values()), *(one.path for one in config.evaluation_sets)]
    for file in files if template is None and has_data else []:
        rows = enumerate(itertools.islice(read_rows(file), SAMPLED_ROWS), start=1)
        if number := next((number for number, row in rows if not isinstance(row["prompt"], str)), None):
            raise InputMissing(
                f"reward.model.chat_template: unset, and {path!r} has none; prompt {number} of {file} is a list of chat"
                " messages: give a template (Jinja text or a file), or prompts as plain text"
            )


def memory(config: Config, plan: Plan) -> str:
    """A line for each reward server on GPUs: its weights and devices; else empty."""
    model = config.reward.model
    if model.path is None or not Path(model.path).is_dir():
        return ""
    weights = parameters(Path(model.path)) * (4 if model.dtype == "float32" else 2)
    lines = []
    for server in [process for process in plan.processes if process.role == "reward" and process.devices]:
        others = [
            process.name
            for process in plan.processes
            if process.node == server.node and process is not server and set(process.devices) & set(server.devices)
        ]
        shared = f", shared with {', '.join(others)}" if others else ""
        lines.append(
            f"memory of {server.name}: {weights / GIB:.2f} GiB of weights on {server.node}:{ranges(server.devices)}"
            f"{shared}; activations of up to {model.max_tokens_per_batch} tokens come on top\n"
        )
    return "".join(lines)


def parameters(folder: Path) -> int:
    """Elements of all tensors of a folder, from the headers of its files."""
    return sum(_elements(entry) for file in folder.glob("*.safetensors") for entry in _entries(header_of(file)))


def _entries(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (entry for name, entry in header.items() if name != "__metadata__")


def _elements(entry: dict[str, Any]) -> int:
    count = 1
    for size in entry["shape"]:
        count *= int(size)
    return count
