"""One setting of another framework, and the file that it stands in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.errors import ConfigError

Framework = str
"""One of configs.translate.tables.FRAMEWORKS."""


class Untranslatable(
    ConfigError,
    code="SLIP-CONFIG-14",
    cause="The file is none of verl, slime, prime-rl or TRL, cannot be parsed, or starts no GRPO training there.",
    mend="Give what starts the training there: docs/migration.md shows a file of each framework.",
):
    """A file of another framework cannot be translated."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A name and its value, as the file has them.

    Example: Setting("actor_rollout_ref.rollout.n", 5, shown="actor_rollout_ref.rollout.n: 5")
    """

    name: str
    value: Any
    shown: str
    open: str = ""
    """What the value depends on and the file does not say, such as `$DATA`."""


@dataclass(slots=True)
class Foreign:
    """The settings of a file, in its order."""

    framework: Framework
    sources: tuple[str, ...]
    settings: list[Setting] = field(default_factory=list)
    is_asynchronous: bool = False
    """Sampling goes on during training there: the translation keeps a lag above 0."""
    remarks: list[str] = field(default_factory=list)
    """What was read in a way that the reader has to know of."""

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of the last setting whose name ends like one of these, whole parts compared."""
        for setting in reversed(self.settings):
            name = setting.name.lstrip("-").replace("-", "_")
            if not setting.open and any(name == end or name.endswith(f".{end}") for end in names):
                return setting.value
        return default


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value that is no mapping; tables in a list are named without their number."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                yield from leaves(item, f"{name}.")
        else:
            yield name, value
