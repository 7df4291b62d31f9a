"""What all processes of a run must agree on: hashes of the model folder's files, and the configuration's shared keys.

Token ids are the only currency between rollout servers and learner. Ends that read different tokenizers, chat templates
or architectures, or that score with different rewards, would train on the wrong thing without any error, so replay
compares these at Hello. Needs neither torch nor transformers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from configs.errors import SlipstreamError, kind_of
from configs.schema import Config
from configs.shared import shared_values
from slipstream.families.experts import experts_of
from slipstream.families.pictures import decoder_of, vision_of
from slipstream.families.table import FAMILIES
from slipstream.families.tower import tower_digest

ARCHITECTURE_KEYS = (
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_parameters", "rope_scaling", "sliding_window", "use_sliding_window"),
)
TOKENIZER_SETTINGS = ("bos_token", "eos_token", "add_bos_token", "add_eos_token")
TOKENIZER_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
NO_TEMPLATE = "none"


class FingerprintError(SlipstreamError, ValueError, code="SLIP-MODEL-01"):
    """A model folder cannot be used; the message names the file that is missing or broken."""


def run_fingerprint(config: Config) -> dict[str, str]:
    """What Hello carries: hashes of the model folder by name, values by key (configs/shared.py).

    Raises FingerprintError.
    """
    found = model_fingerprint(config.model.path, config.model.chat_template)
    if config.model.chat_template_options:
        found["chat_template"] += f" with {_hash(config.model.chat_template_options)}"
    if config.model.family is not None:
        found["family"] = _hash(Path(config.model.family).read_text(encoding="utf-8"))
    return found | shared_values(config)


def model_fingerprint(path: str, chat_template: str | None = None) -> dict[str, str]:
    """Identity of a model folder by name: tokenizer, chat_template, architecture, vocab_size, eos_token_ids.

    The tokenizer is hashed by its contents (vocabulary, merges, added tokens, normalizer, ...), so that saving it
    anew in another layout does not change it; of the weights the vision tower is looked at alone, which no update
    carries. Raises FingerprintError: the folder or one of
    its files is missing or broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FingerprintError(
            f"model.path: {path!r} is no folder; give one with config.json, safetensors and a tokenizer (a model of a"
            " hub is downloaded first)"
        )
    raw = read_json(folder / "config.json")
    config = decoder_of(raw)
    template = resolve_chat_template(path, chat_template)
    vocabulary, token_ids = _vocabulary(folder)
    settings = _tokenizer_settings(folder)
    eos_ids = set(stop_token_ids(path))
    eos = settings["eos_token"]
    if isinstance(eos, str) and eos in token_ids:
        eos_ids.add(token_ids[eos])
    found = {
        "tokenizer": _hash({"vocabulary": vocabulary, "settings": settings}),
        "chat_template": NO_TEMPLATE if template is None else _hash(template),
        "architecture": _hash({key: config[key] for key in _decisive(config) if key in config}),
        "vocab_size": str(config.get("vocab_size", "unknown")),
        "eos_token_ids": ",".join(map(str, sorted(eos_ids))),
    }
    if (experts := experts_of(config)) is not None:
        found["experts"] = experts.told()
    if vision_of(raw) is None:
        return found
    try:
        return found | {
            "vision_tower": tower_digest(folder),
            "image_processor": _hash(read_json(folder / "preprocessor_config.json")),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FingerprintError(f"model.path: {path}: the vision tower is not readable: {error}") from error


TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    RecursionError,
)
"""What a chat template raises: its expressions are Python's, such as `content + 1`."""


def template_failure(messages: Sequence[Mapping[str, Any]], error: Exception, key: str = "model.chat_template") -> str:
    """What to say where the template of this key raises one of these on messages."""
    roles = ", ".join(str(message.get("role")) for message in messages)
    return f"{key}: fails on messages of the roles {roles}: {error} ({type(error).__name__})"


def resolve_chat_template(path: str, chat_template: str | None, key: str = "model.chat_template") -> str | None:
    """The Jinja text of the chat template in force: the given one (text or file), else the folder's own, else none.

    Raises FingerprintError: `chat_template`, the value of `key`, is neither a file nor Jinja text, or the folder's own
    is broken.
    """
    if chat_template is not None:
        if "{%" in chat_template or "{{" in chat_template:
            return chat_template
        try:
            return Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FingerprintError(
                f"{key}: {chat_template[:80]!r} is neither a readable file ({error}) nor Jinja text"
            ) from error
    file = Path(path) / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = _optional_json(Path(path) / "tokenizer_config.json")
    own = settings.get("chat_template")
    if isinstance(own, list):
        own = {entry.get("name"): entry.get("template") for entry in own if isinstance(entry, dict)}.get("default")
    if own is not None and not isinstance(own, str):
        raise FingerprintError(f"{path}/tokenizer_config.json: chat_template is {kind_of(own)}, expected text")
    return own


def stop_token_ids(path: str) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json: none, one or several. Raises FingerprintError when it is broken."""
    file = Path(path) / "generation_config.json"
    value = _optional_json(file).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise FingerprintError(f"{file}: eos_token_id {value!r} is neither a token id nor a list of them")
    return tuple(sorted(set(ids)))


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise FingerprintError(f"{file}: missing; model.path must be a complete Hugging Face folder") from error
    except (OSError, ValueError) as error:
        raise FingerprintError(f"{file}: not readable as JSON: {error}; copy the model folder again") from error
    if not isinstance(value, dict):
        raise FingerprintError(f"{file}: expected a JSON object, found {kind_of(value)}")
    return value


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def token_ids_of(path: str) -> dict[str, int]:
    """Ids of tokens, as far as files say; none of a folder without a tokenizer. Raises FingerprintError: broken."""
    has_one = any((Path(path) / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    return _vocabulary(Path(path))[1] if has_one else {}


def _vocabulary(folder: Path) -> tuple[object, dict[str, int]]:
    """What defines text to ids, and the ids of the added tokens and of the vocabulary as far as they can be read."""
    if (folder / "tokenizer.json").is_file():
        parts = read_json(folder / "tokenizer.json")
        return _canonical(parts), _token_ids(parts)
    declared = _optional_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    ids = {token["content"]: int(number) for number, token in declared.items()}
    for names in (("vocab.json", "merges.txt"), ("tokenizer.model",)):
        if all((folder / name).is_file() for name in names):
            hashes = [hashlib.blake2b((folder / name).read_bytes(), digest_size=16).hexdigest() for name in names]
            return hashes, _optional_json(folder / "vocab.json") | ids
    raise FingerprintError(
        f"{folder}/tokenizer.json: missing (and neither vocab.json with merges.txt nor tokenizer.model is there); save"
        " the tokenizer into the model folder"
    )


def _canonical(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The parts of tokenizer.json that decide ids. Truncation and padding change with use, and merges come in two
    spellings (`"a b"` and `["a", "b"]`)."""
    parts = {key: tokenizer.get(key) for key in TOKENIZER_PARTS}
    model = parts["model"]
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        parts["model"] = model | {"merges": merges}
    return parts


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Settings beside the vocabulary that decide ids; older folders spell a token as a mapping."""
    raw = _optional_json(folder / "tokenizer_config.json")
    settings = {key: raw.get(key) for key in TOKENIZER_SETTINGS}
    return {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items()}


def _decisive(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of config.json that change what is computed."""
    family = FAMILIES.get(config.get("model_type", ""))
    return (*ARCHITECTURE_KEYS, *(family.decides if family else ()))


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
