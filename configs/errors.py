"""The root of every error that a user can meet, and the errors of a configuration.

Each class has a code, which stands at the end of the first line of its message. slipstream/command/errors.yaml says
what causes it and what mends it: `slipstream explain CODE` shows both, docs/reference/errors.md all.

    SlipstreamError > ConfigError, DataError, FingerprintError, ChannelError, WireError, JournalError, WeightBusError,
                      EngineError, RewardError, EnvironmentFailed, TaskError, BatchError, SilentlyWrong, RunFailed, ...
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

CODE = re.compile(r" ?\[(SLIP-[A-Z]+-\d\d)\]")


class SlipstreamError(Exception):
    """Base of the tree. The first line of a docstring is the symptom; a class without a code has that of its base."""

    code: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: str = "") -> None:
        """Set the code."""
        super().__init_subclass__()
        cls.code = code or cls.code

    def __str__(self) -> str:
        return coded(super().__str__(), self.code)


def coded(text: str, code: str) -> str:
    """The text with one code, at the end of its first line: that of the innermost error in it, or else `code`.

    Example: coded("reward.function: no file 'a.py'\\nlook again", "SLIP-REWARD-01") ends its first line in
    ` [SLIP-REWARD-01]`.
    """
    found = CODE.findall(text)
    first, newline, rest = CODE.sub("", text).partition("\n")
    chosen = found[0] if found else code
    return f"{first} [{chosen}]{newline}{rest}" if chosen else text


def kind_of(value: object) -> str:
    """The type of a value with its article. Example: `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


class Unexpected(SlipstreamError, RuntimeError, code="SLIP-RUN-08"):
    """A process broke off with an error that was not foreseen."""


class ConfigError(SlipstreamError, ValueError, code="SLIP-CONFIG-01"):
    """What was given cannot be used; the message names the key, file or option, the value, and a way out."""

    unknown: Sequence[str] = ()
    """Keys that are none of ours: another framework may have them (slipstream/translate/refusals.py)."""


class UnknownKey(ConfigError, code="SLIP-CONFIG-02"):
    """A key of the file or of `--set` does not exist."""


class BadValue(ConfigError, code="SLIP-CONFIG-03"):
    """The value of a key is not one that the key can have."""


class Contradiction(ConfigError, code="SLIP-CONFIG-04"):
    """Two keys do not go together."""


class BadOption(ConfigError, code="SLIP-CONFIG-05"):
    """An option of the command line cannot be understood."""


class BadFile(ConfigError, code="SLIP-CONFIG-06"):
    """The configuration file cannot be read."""


class BadPlacement(ConfigError, code="SLIP-CONFIG-07"):
    """The placement of processes on devices and nodes cannot be."""


class InputMissing(ConfigError, code="SLIP-CONFIG-08"):
    """A file or folder that a key names cannot be used."""


class PackageMissing(ConfigError, code="SLIP-CONFIG-09"):
    """A package that the configuration needs is missing."""


class NoRoom(ConfigError, code="SLIP-CONFIG-10"):
    """This machine has no room for the run."""


class BadRunFolder(ConfigError, code="SLIP-CONFIG-11"):
    """A run cannot go on from this folder with these options."""


class BadHosts(ConfigError, code="SLIP-CONFIG-12"):
    """The run cannot be laid out over these hosts."""
