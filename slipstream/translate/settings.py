"""One setting of another framework, and the file that it stands in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.errors import ConfigError
from slipstream.translate.names import TABLES

Kind = Literal["key", "not needed", "no counterpart", "open", "unknown"]


class Untranslatable(ConfigError, code="SLIP-CONFIG-14"):
    """A file of another framework cannot be translated."""


class Undecided(ConfigError, code="SLIP-CONFIG-15"):
    """Keys of a translation that the user has to give."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """A part of a file with settings of another model, which are named as those of the policy are."""

    model: str
    words: Sequence[str] = ()
    """Parts of names that mean that model alone."""
    switch: str = ""
    """What turns a model on that there is none of here; empty of a teacher: its section alone."""


SECTIONS: Mapping[str, Mapping[str, ModelSection]] = {
    framework: {start: ModelSection(**section) for start, section in sections.items()}
    for framework, sections in TABLES["sections"].items()
}
"""By framework and beginning of the names."""


def section_of(framework: str, name: str) -> ModelSection | None:
    """The section of another model that a setting stands in; None: the name is the policy's, or the run's."""
    found = SECTIONS.get(framework, {}).items()
    return next((section for start, section in found if name == start or name.startswith(f"{start}.")), None)


def can_mean(framework: str, name: str, end: str) -> bool:
    """Whether this end of a name says enough: in another model's section it has to hold that section's word.

    Example: of critic.optim.lr, `critic.optim.lr` does, and `optim.lr` would be the policy's.
    """
    section = section_of(framework, name)
    return section is None or any(word in section.words for word in end.split("."))


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


@dataclass(frozen=True, slots=True)
class Line:
    """One setting and what became of it."""

    shown: str
    kind: Kind
    pairs: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    decides: str = ""
    """Of kind `open`: the key that the user has to give."""


@dataclass(slots=True)
class Foreign:
    """The settings of a file, in its order."""

    framework: str
    sources: tuple[str, ...]
    settings: list[Setting] = field(default_factory=list)
    is_whole: bool = False
    """It has every setting of the framework, most of them unset, as resolved files do."""
    remarks: list[str] = field(default_factory=list)
    """What was read in a way that the reader has to know of."""

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of the last setting whose name ends like one of these, whole parts compared.

        A null gives way to a value under another full name, as files of verl have old and new names of a setting.
        """
        found = list(self._values(*names).values())
        given = [value for value in found if value is not None]
        return (given or found)[-1] if found else default

    def is_on(self, *names: str) -> bool:
        """Whether one of several names of a switch is on; the last value of each counts."""
        return any(self._values(*names).values())

    def is_open(self, *names: str) -> bool:
        """Whether the file does not say what one of these is."""
        return any(setting.open for _, setting in self._named(*names))

    def _values(self, *names: str) -> dict[str, Any]:
        """Full names and values, the one that was given last at the end."""
        found: dict[str, Any] = {}
        for name, setting in self._named(*names):
            if not setting.open:
                found.pop(name, None)
                found[name] = setting.value
        return found

    def _named(self, *names: str) -> Iterator[tuple[str, Setting]]:
        for setting in self.settings:
            name = setting.name.lstrip("-").replace("-", "_")
            ends = (end for end in names if name == end or name.endswith(f".{end}"))
            if any(can_mean(self.framework, name, end) for end in ends):
                yield name, setting


TOGETHER = (".env.taskset", ".env.args", ".env.agent")


def leaves(tree: Mapping[str, Any], prefix: str = "", number: int = 0) -> Iterator[tuple[str, Any, int]]:
    """(dotted name, value, number) of every value that is no mapping.

    Tables in a list are named without their number, which counts from 0. An environment's own settings stay together.
    """
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.endswith(TOGETHER):
            yield from leaves(value, f"{name}.", number)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for at, item in enumerate(value):
                yield from leaves(item, f"{name}.", max(number, at))
        else:
            yield name, value, number
