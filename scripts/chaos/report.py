"""The driver of all campaigns: plan, run among faults, check, one line of JSON; and the state that one goes on from."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.chaos.polling import Ended, Hung, replace_text

STATE = "state.json"
BEGAN = time.monotonic()
OPTIONS: dict[str, tuple[Any, str]] = {
    "seed": (1, "of everything that is drawn"),
    "work": (None, "folder for logs and runs, also to go on in; default: a new one"),
    "keep": (False, "leave the folder there also when all is in order"),
}
"""(default, help) of every campaign's options. Values have the default's type; None stands for a path, and a tuple of
lines is printed."""
ELSEWHERE = ("work", "keep", "data", "log")  # options that change nothing of what is done


class State:
    """What a campaign has done so far, in its work folder: started again with the same arguments, it goes on there.

    Raises ValueError where the folder holds something else.
    """

    def __init__(self, work: Path | None, campaign: str, arguments: Mapping[str, Any]) -> None:
        self.work = (work or Path(tempfile.mkdtemp(prefix=f"chaos-{campaign}-"))).resolve()
        self._path = self.work / STATE
        self._head = {"campaign": campaign, "arguments": dict(arguments)}
        self.done: list[Any] = []  # a JSON value for each part that is over
        if self._path.exists():
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.done = found.pop("done")
            if found != self._head:
                raise ValueError(f"--work {work}: is of {json.dumps(found)}, not {json.dumps(self._head)}")
        elif self.work.exists() and any(self.work.iterdir()):
            raise ValueError(f"--work {work}: is not empty and has no {STATE}; take another folder")
        self.work.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, part: Any) -> None:
        self.done.append(part)
        self._write()

    def fresh(self, name: str) -> Path:
        """An empty folder in the work folder, in place of what an ended campaign has left there."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _write(self) -> None:
        replace_text(self._path, json.dumps({**self._head, "done": self.done}))


def drive(campaign: ModuleType, name: str, argv: Sequence[str]) -> int:
    """Command line of a campaign; its exit code, 0 only when nothing is wrong. A campaign is a module with

    OPTIONS                     its own, as above
    plan(args)                  what is to be done, drawn from the seed; ValueError for arguments without a plan
    run(plan, state, args)      does what the state has not, and adds each part to it as it ends
    verdict(state, hung, args)  the line of JSON, and everything that is wrong; `hung` is what ended the run early
    """
    parser = make_parser(name, str(campaign.__doc__), {**OPTIONS, **campaign.OPTIONS})
    args = parser.parse_args(argv)
    try:
        for option, value in vars(args).items():
            if type(value) is int and value < 1 and option != "seed":
                raise ValueError(f"--{option.replace('_', '-')} {value}: must be at least 1")
        plan = campaign.plan(args)
        arguments = {option: value for option, value in vars(args).items() if option not in ELSEWHERE}
        state = State(args.work, name.replace(" ", "-"), arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    end_on_sigterm()
    hung = ""
    try:
        campaign.run(plan, state, args)
    except (Hung, Ended) as error:
        hung = f"{error}"
    result, wrong = campaign.verdict(state, hung, args)
    wrong = [*([f"{hung}; see {state.work}"] if hung else []), *wrong]
    code = conclude(result, wrong, in_order=not wrong)
    if code == 0 and args.work is None and not args.keep:
        shutil.rmtree(state.work)
    else:
        sys.stderr.write(f"{name}: what is left of it is in {state.work}\n")
    return code


def make_parser(name: str, description: str, options: Mapping[str, tuple[Any, str]]) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m scripts.chaos {name}", description=description, formatter_class=raw)
    for option, (default, text) in options.items():
        word = f"--{option.replace('_', '-')}"
        if default is False:
            parser.add_argument(word, action="store_true", help=text)
        elif isinstance(default, tuple):
            parser.add_argument(word, action="version", version="\n".join(default), help=text)
        elif isinstance(default, list):
            parser.add_argument(word, action="append", default=[], help=text)
        else:
            shown = text if default in (None, "") else f"{text} (default: {default})"
            parser.add_argument(word, type=Path if default is None else type(default), default=default, help=shown)
    return parser


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


def conclude(result: Mapping[str, Any], wrong: Iterable[str], *, in_order: bool) -> int:
    for text in wrong:
        print(f"WRONG: {text}")
    print(json.dumps(result), flush=True)
    return 0 if in_order else 1


def end_on_sigterm() -> None:
    """SIGTERM ends the campaign as Ctrl-C does: everything that was started is ended on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
