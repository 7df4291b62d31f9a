"""The root of every error that a user can meet, and the errors of a configuration.

Each class has a code, which stands at the end of the first line of its message, and says what causes it and what mends
it: `slipstream explain CODE` shows both, docs/reference/errors.md all. A code is never given to another cause.

    SlipstreamError > ConfigError, DataError, FingerprintError, ChannelError, WireError, JournalError, WeightBusError,
                      EngineError, RewardError, EnvironmentFailed, TaskError, BatchError, SilentlyWrong, RunFailed, ...
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

CODE = re.compile(r" ?\[(SLIP-[A-Z]+-\d\d)\]")


class SlipstreamError(Exception):
    """Base of the tree. The first line of a docstring is the symptom, the arguments of the class are the rest."""

    code: ClassVar[str] = ""
    cause: ClassVar[str] = ""
    mend: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: str = "", cause: str = "", mend: str = "") -> None:
        """Set code, cause and mend; a class without them has those of its base."""
        super().__init_subclass__()
        if code:
            cls.code, cls.cause, cls.mend = code, cause, mend

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


class Unexpected(
    SlipstreamError,
    RuntimeError,
    code="SLIP-RUN-08",
    cause="An error of torch, of the operating system or of Slipstream itself that has no name of its own.",
    mend="The log has the whole traceback; the launcher starts the process again. Report it where it comes back.",
):
    """A process broke off with an error that was not foreseen."""


class ConfigError(
    SlipstreamError,
    ValueError,
    code="SLIP-CONFIG-01",
    cause="A key or an option has a value that this run cannot use, or several problems were found at once.",
    mend="Change the value as the message says. `--dry-run` checks everything and starts nothing.",
):
    """What was given cannot be used; the message names the key, file or option, the value, and a way out."""

    unknown: Sequence[str] = ()
    """Keys that are none of ours: another framework may have them (slipstream/translate/refusals.py)."""


class UnknownKey(
    ConfigError,
    code="SLIP-CONFIG-02",
    cause="A key is misspelt, belongs to another version, or is the name that another framework has for it.",
    mend="Take the key that the message suggests; docs/configuration.md lists all of them.",
):
    """A key of the file or of `--set` does not exist."""


class BadValue(
    ConfigError,
    code="SLIP-CONFIG-03",
    cause="The value is of another type, outside of the bounds of the key, or none of its names.",
    mend="Give a value of the type and within the bounds that docs/configuration.md has for the key.",
):
    """The value of a key is not one that the key can have."""


class Contradiction(
    ConfigError,
    code="SLIP-CONFIG-04",
    cause="Each value is possible by itself, but not together with that of another key.",
    mend="Change one of the keys that the message names, in the way that it proposes.",
):
    """Two keys do not go together."""


class BadOption(
    ConfigError,
    code="SLIP-CONFIG-05",
    cause="An option of the command line is misspelt, lacks its value or does not go with another one.",
    mend="Write the option as the message or `--help` shows it; `--set` takes section.key=value, the value as YAML.",
):
    """An option of the command line cannot be understood."""


class BadFile(
    ConfigError,
    code="SLIP-CONFIG-06",
    cause="The file of --config is not there, is no YAML, or is no mapping of sections.",
    mend="Give a file or a preset that there is; mend the line that the message names.",
):
    """The configuration file cannot be read."""


class BadPlacement(
    ConfigError,
    code="SLIP-CONFIG-07",
    cause="Devices are given twice, are missing, or do not divide as engines and learner ranks need them.",
    mend="Correct placement.split, or placement.rollout and placement.learner; `--dry-run` prints what runs where.",
):
    """The placement of processes on devices and nodes cannot be."""


class InputMissing(
    ConfigError,
    code="SLIP-CONFIG-08",
    cause="A model folder, a file of prompts or of code that a key names is missing, incomplete or broken.",
    mend="Correct the path, or copy or download the folder again; relative paths begin where the command is started.",
):
    """A file or folder that a key names cannot be used."""


class PackageMissing(
    ConfigError,
    code="SLIP-CONFIG-09",
    cause="A key asks for what an optional package does, and that package is not installed or lacks its device.",
    mend="Install the extra that the message names, or take the other value of the key.",
):
    """A package that the configuration needs is missing."""


class NoRoom(
    ConfigError,
    code="SLIP-CONFIG-10",
    cause="GPU memory, a disk, a port or a GPU that the run needs is not free, or not there.",
    mend="Free it, or change the key that the message names; `--dry-run` prints the memory budget.",
):
    """This machine has no room for the run."""


class BadRunFolder(
    ConfigError,
    code="SLIP-CONFIG-11",
    cause="The folder of --resume or --replay is no run, or was begun with values that its journal depends on.",
    mend="Name the folder of a run, and leave out the options that the message names.",
):
    """A run cannot go on from this folder with these options."""


class BadHosts(
    ConfigError,
    code="SLIP-CONFIG-12",
    cause="The host file, the order for a node or the nodes of the placement do not fit together.",
    mend="Correct the line of the host file or the placement that the message names, on all nodes alike.",
):
    """The run cannot be laid out over these hosts."""


class TrlDisagrees(
    ConfigError,
    code="SLIP-CONFIG-13",
    cause="TRL's arguments and the configuration describe different batches or another algorithm.",
    mend="Take AsyncGRPOConfig(..., **trl_arguments(config, ...)); docs/howto/trl.md.",
):
    """TRL's trainer and the configuration do not agree."""
