"""`slipstream NAME ...`: one command for what `python -m` starts; only the module of NAME is imported.

The table names modules and imports none, so the two ends of a run still never import each other.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from slipstream.runtime.packages import require_ours
from slipstream.runtime.program import NAME


@dataclass(frozen=True, slots=True)
class Command:
    """What a name starts."""

    module: str
    """As `python -m` takes it."""
    does: str
    """Its line of the help; empty for one that stands in the last line alone."""
    first: tuple[str, ...] = ()
    """Arguments that go before those of the command line."""


COMMANDS = {
    "train": Command("learner.main", "train by a configuration; by itself, the quick start"),
    "playback": Command("learner.main", "train RUN_DIR's journal again and compare digests", ("--replay",)),
    "launch": Command("slipstream.launch", "learner or rollout side: here, over ssh, Slurm, Kubernetes"),
    "start-replay": Command("replay.main", "replay alone on this host"),
    "start-rollout": Command("rollout_server.main", "one rollout server of a run elsewhere"),
    "doctor": Command("slipstream.launch.doctor", "examine machines, packages, links and disks before a run"),
    "plan": Command("slipstream.plan", "predict step times of every split; say which to take"),
    "fit": Command("slipstream.check.fit", "largest microbatch that fits a learner GPU"),
    "try-reward": Command("rollout_server.try_reward", "judge a few answers with the reward"),
    "status": Command("slipstream.view.top", "one line: what RUN_DIR waits for, or how it has ended", ("--line",)),
    "top": Command("slipstream.view.top", "live view of RUN_DIR in a terminal, also over ssh"),
    "dashboard": Command("slipstream.view.dashboard", "browser view of RUN_DIR: curves, pipeline, answers"),
    "translate": Command("slipstream.translate", "a run of verl, slime, prime-rl or TRL as a YAML file here"),
    "keys": Command("replay.keys", "make, add and remove CURVE keys"),
    "explain": Command("slipstream.command.errors", "cause and remedy of an error code"),
    "hang": Command("slipstream.runtime.hang", "stacks and waits of a run that stands still"),
    "check-export": Command("slipstream.view.check_export", ""),
    "plot": Command("slipstream.view.plot", ""),
    "sandbox": Command("rollout_server.tasks.sandbox", ""),
    "summary": Command("learner.record.summary", ""),
    "sweep": Command("slipstream.sweep", ""),
    "trace": Command("slipstream.view.trace", ""),
}
"""By name, in the order of the help."""


def entry_module(module: str) -> str:
    """The module that has `main`: of a package, its `__main__`."""
    spec = importlib.util.find_spec(module)
    return f"{module}.__main__" if spec is not None and spec.submodule_search_locations is not None else module


def overview() -> str:
    """The help: at most 24 lines of 80 columns."""
    shown = [(name, command.does) for name, command in COMMANDS.items() if command.does]
    others = ", ".join(name for name, command in COMMANDS.items() if not command.does)
    return "\n".join(
        [
            f"usage: {NAME} COMMAND [arguments]    ({NAME} COMMAND --help shows them)",
            "",
            *(f"  {name:<15}{does}" for name, does in shown),
            "",
            f"also: {others}",
            f"{NAME} doctor --config P    before the first run",
            f"{NAME} train --config P     P: a YAML file, or a preset such as quickstart",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    try:
        require_ours()
    except ImportError as error:
        sys.stderr.write(f"{NAME}: refused: {error}\n")
        return 2
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview() + "\n")
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"{NAME} {_version()}\n")
        return 0
    name, arguments = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(f"{NAME}: {_no_such(name)}\n")
        return 2
    # a request for help is for the module's own parser
    first = () if set(arguments) & {"-h", "--help"} else command.first
    sys.argv = [f"{NAME} {name}", *first, *arguments]
    return int(importlib.import_module(entry_module(command.module)).main() or 0)


def _version() -> str:
    try:
        return metadata.version("slipstream-rl")
    except metadata.PackageNotFoundError:
        return "of a clone that is not installed"


def _no_such(name: str) -> str:
    from configs.loading import did_you_mean  # here, because it loads the schema, which the other commands do without

    hint = did_you_mean(name, COMMANDS) or f"there are {', '.join(COMMANDS)}"
    return f"no command {name!r}; {hint} ({NAME} --help shows all)"
