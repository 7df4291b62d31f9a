"""What all processes of a run must agree on, as a fingerprint that travels in Hello."""

from configs.schema import Config
from replay.fingerprint import model_fingerprint


def run_fingerprint(config: Config) -> dict[str, str]:
    """Model folder, sampling and group shape by name. Replay refuses a peer that differs.

    Raises:
        FingerprintError: a file of the model folder is missing or broken.
    """
    return model_fingerprint(config.model.path, config.model.chat_template) | {
        "rollout.group_size": str(config.rollout.group_size),
        "rollout.max_new_tokens": str(config.rollout.max_new_tokens),
        "rollout.temperature": repr(config.rollout.temperature),
        "rollout.dtype": config.rollout.dtype,
    }
