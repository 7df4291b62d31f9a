"""The model folders beside model.path, checked before they are used. Imports no torch."""

from pathlib import Path

from configs.errors import Contradiction, InputMissing
from configs.schema import Config
from slipstream.families.pictures import decoder_of, vision_of
from slipstream.runtime.fingerprint import ARCHITECTURE_KEYS, model_fingerprint, read_json, token_ids_of


def beside(config: Config) -> dict[str, str]:
    """Folders of the models in the learner's ranks beside the policy, by key."""
    given = {"algorithm.reference_path": config.algorithm.reference_path, "critic.path": config.critic.path}
    given |= {f"teachers.{name}.path": one.path for name, one in config.teachers.items() if one.where == "learner"}
    return {key: path for key, path in given.items() if path is not None}


def check_folders(config: Config) -> None:
    """Refuse a reference model, a critic or a teacher in the learner that cannot speak of the policy's tokens.

    Raises:
        ConfigError: no such folder, no weights, another vocabulary or other ids; a context that is too short; another
            architecture than the policy's, of which the reference is to become a copy; or a teacher of another
            tokenizer, or of text alone beside pictures.
        FingerprintError: its config.json is missing or broken.
    """
    given, refresh_steps = beside(config), config.algorithm.reference_refresh_steps
    policy = read_json(Path(config.model.path) / "config.json") if given else {}
    for key, path in given.items():
        if not Path(path).is_dir() or not any(Path(path).glob("*.safetensors")):
            raise InputMissing(f"{key}: {path!r} is no folder with config.json and safetensors; give one, or none")
        own = read_json(Path(path) / "config.json")
        if own.get("vocab_size") != policy.get("vocab_size"):
            raise Contradiction(
                f"{key}: {path!r} has a vocabulary of {own.get('vocab_size')} tokens, model.path one of"
                f" {policy.get('vocab_size')}; take a model with the same tokenizer"
            )
        (_check_teacher if key.startswith("teachers.") else _check_ids)(key, path, config)
        limit = decoder_of(own).get("max_position_embeddings")
        if isinstance(limit, int) and config.longest_trajectory > limit:
            raise Contradiction(
                f"{key}: {path!r} has max_position_embeddings {limit}, and a trajectory may have"
                f" {config.longest_trajectory} tokens (data.max_prompt_tokens and rollout.max_new_tokens); lower one of"
                " them, or take a model of longer context"
            )
        different = [name for name in ARCHITECTURE_KEYS if own.get(name) != policy.get(name)]
        if different and key == "algorithm.reference_path" and refresh_steps:
            name = different[0]
            raise Contradiction(
                f"algorithm.reference_refresh_steps: {refresh_steps}, but {path!r} has {name}"
                f" {own.get(name)!r} and model.path {policy.get(name)!r}; take 0 steps, or a reference of the policy's"
                " architecture"
            )


def _check_ids(key: str, path: str, config: Config) -> None:
    """A folder without a tokenizer, and tokens that only one has, are no matter."""
    theirs, ours = token_ids_of(path), token_ids_of(config.model.path)
    for token in sorted(token for token in theirs.keys() & ours.keys() if theirs[token] != ours[token]):
        raise Contradiction(
            f"{key}: {path!r} has the id {theirs[token]} for the token {token!r}, model.path {ours[token]}: ids"
            " mean other text there; take a model with the same tokenizer"
        )


def _check_teacher(key: str, path: str, config: Config) -> None:
    """Its logits are compared with the policy's by token id, and its prompt is the policy's."""
    theirs, ours = (model_fingerprint(folder)["tokenizer"] for folder in (path, config.model.path))
    if theirs != ours:
        raise Contradiction(
            f"{key}: {path!r} has tokenizer {theirs}, model.path {ours}; token ids mean other text there; take a"
            " teacher with the policy's tokenizer"
        )
    if vision_of(read_json(Path(config.model.path) / "config.json")) is not None:
        raise Contradiction(
            f"{key}: {path!r} in the learner reads text alone, and model.path takes pictures; take where: own with"
            " algorithm.distillation top_k"
        )
