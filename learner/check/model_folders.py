"""Model folders before a run: files, headers, and whether the run's lengths and mesh fit. Imports no torch."""

import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import Contradiction, InputMissing
from configs.plan import Plan, ranges
from configs.schema import Config
from learner.beside.folders import check_folders
from learner.check.pictures import problem_with_pictures
from learner.checkpoints.folders import MARK, incomplete
from learner.policy.divisibility import problem_with
from learner.policy.memory import GIB
from replay.fingerprint import FingerprintError, model_fingerprint, read_json, resolve_chat_template
from replay.pictures import decoder_of
from replay.prompts import read_rows

REWARD = "reward.model.path"
HEAD = "ForSequenceClassification"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAMPLED_ROWS = 64


def check_policy(config: Config) -> None:
    """The policy's folder, and the reference's and the critic's.

    Raises:
        ConfigError: model folder missing, weights cut short, too few positions, or sizes that learner.mesh does not
            divide.
        FingerprintError: a file of the model folder is missing or broken.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise InputMissing(
            f"model.path: no folder {config.model.path!r}; give a Hugging Face folder with config.json, safetensors and"
            " a tokenizer"
        )
    checkpoint = folder.parent if folder.name == "hf" else folder
    if any((checkpoint / name).exists() for name in ("dcp", "state.json", MARK)) and (reason := incomplete(checkpoint)):
        raise InputMissing(
            f"model.path: checkpoint {checkpoint} is not complete ({reason}); its run clears or completes it with"
            " --resume; take another step_N beside it"
        )
    _check_weights(folder, "model.path")
    model_fingerprint(config.model.path, config.model.chat_template)
    raw = read_json(folder / "config.json")
    model = decoder_of(raw)
    if problem := problem_with_pictures(config, raw) or problem_with(config.learner.mesh, model):
        raise Contradiction(problem)
    limit, prompt = model.get("max_position_embeddings"), config.data.max_prompt_tokens
    answers = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    answers |= {f"{one.key}: max_new_tokens": one.max_new_tokens for one in config.evaluation_sets}
    for key, answer in answers.items():
        if isinstance(limit, int) and prompt + answer > limit:
            raise Contradiction(
                f"{key}: {answer} after data.max_prompt_tokens {prompt} are {prompt + answer} tokens, and"
                f" {folder / 'config.json'} has max_position_embeddings {limit}; lower one of them"
            )
    check_folders(config)


def _check_weights(folder: Path, key: str) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputMissing(
            f"{key}: {str(folder)!r} has no *.safetensors file; copy or download the folder again, or save the model"
            " with save_pretrained"
        )
    for file in files:
        try:
            header_of(file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
            raise InputMissing(f"{key}: {file} is broken ({error}); copy or download the file again") from error


def header_of(file: Path) -> dict[str, Any]:
    """The header: by tensor its dtype, shape and place (8 bytes of length, then JSON).

    Raises OSError, ValueError, struct.error: it is cut short, or no header.
    """
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        size = file.stat().st_size
        if length > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        expected = 8 + length + max((entry["data_offsets"][1] for entry in _entries(header)), default=0)
        if size != expected:
            raise ValueError(f"{size} bytes, its header says {expected}")
        return header


def _entries(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (entry for name, entry in header.items() if name != "__metadata__")


# ---- a reward model ---------------------------------------------------------------------------------------


def check_reward_model(config: Config, *, has_data: bool = True) -> None:
    """Check the folder by its files' headers, and against the prompts where they are.

    Raises:
        ConfigError: no folder, no model with one label, weights or tokenizer missing, or no chat template for a prompt
            of chat messages.
    """
    path = config.reward.model.path
    if path is None:
        return
    folder = Path(path)
    if not folder.is_dir():
        raise InputMissing(
            f"{REWARD}: no folder {path!r}; give the Hugging Face folder of a sequence classification model with one"
            " label (a model of a hub is downloaded first)"
        )
    _check_head(folder)
    _check_weights(folder, REWARD)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise InputMissing(f"{REWARD}: {path!r} has no tokenizer; save the reward model's tokenizer into it")
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


def _check_head(folder: Path) -> None:
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputMissing(f"{REWARD}: {file} is not readable as JSON ({error}); copy the folder again") from error
    names = settings.get("architectures") or []
    if not any(str(name).endswith(HEAD) for name in names):
        raise InputMissing(
            f"{REWARD}: {file} names the architecture {', '.join(map(str, names)) or 'of nothing'}, which has no head"
            f" for a score; give a folder of ...{HEAD}, saved with num_labels=1"
        )
    labels = len(settings["id2label"]) if "id2label" in settings else settings.get("num_labels", 2)
    if labels != 1:
        raise InputMissing(
            f"{REWARD}: {file} has {labels} labels (id2label), and a scalar reward model has 1; train or convert it"
            " with num_labels=1"
        )


def reward_memory(config: Config, plan: Plan) -> str:
    """A line for each reward server on GPUs: its weights and devices; else empty."""
    model = config.reward.model
    if model.path is None or not Path(model.path).is_dir():
        return ""
    files = Path(model.path).glob("*.safetensors")
    elements = sum(math.prod(entry["shape"]) for file in files for entry in _entries(header_of(file)))
    weights = elements * (4 if model.dtype == "float32" else 2)
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
