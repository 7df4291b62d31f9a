"""What every process of a run must be configured alike in: values by key, compared at Hello (replay/state/peers.py)."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from configs.base import Scope, Section
from configs.schema import Config
from configs.variants import Choice

LONGEST = 200
"""Characters of a value that is compared, and shown, as it is; of a longer one its digest."""
SERVER_PARTS = (
    *("run.", "model.", "data.", "reward.", "environment.", "rollout.", "replay.", "weight_bus.", "network."),
    "learner.lora.",
    "teachers.",
)
"""Beginnings of the keys that rollout servers and teachers read; a learner rank must agree in all of them."""


def shared_values(config: Config) -> dict[str, str]:
    """Every key that peers compare, by its dotted name, as JSON; secrets and long values as digests.

    Example: {"learner.lr": "1e-06", "reward.function": '"numeric"', "data.shuffle": "true"}
    """
    return dict(_values(config, ""))


def concerns(role: str, key: str) -> bool:
    """Whether peers of this role are compared in this key; of a teacher's model the tokenizer alone is the run's."""
    if role == "teacher":
        return key == "tokenizer" or key.startswith(SERVER_PARTS)
    return role != "rollout_server" or "." not in key or key.startswith(SERVER_PARTS)


def _values(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        scope = next((one for one in field.metadata if isinstance(one, Scope)), None)
        if isinstance(value, Section):
            yield from _values(value, f"{prefix}{name}.")
        elif name == "teachers" and value:
            yield f"{prefix}{name}.names", _shown(list(value), is_secret=False)
            for label, one in value.items():
                yield from _values(one, f"{prefix}{name}.{label}.")
        elif scope is Scope.PATH:
            yield f"{prefix}{name}", "unset" if value is None else "set"
        elif isinstance(value, Choice) and scope is Scope.SECRET and value.options:
            yield f"{prefix}{name}", f"{value.name}, options of {_shown(dict(value.options), is_secret=True)}"
        elif scope is not Scope.PROCESS:
            yield f"{prefix}{name}", _shown(plain[name], is_secret=scope is Scope.SECRET)


def _shown(value: Any, *, is_secret: bool) -> str:
    text = json.dumps(value, sort_keys=True)
    if not is_secret and len(text) <= LONGEST:
        return text
    return f"digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
