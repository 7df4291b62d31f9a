"""`slipstream top RUN_DIR`: the live view of a run, from its folder, in any terminal; `slipstream status`: one line.

It reads metrics.jsonl and the logs, and asks replay how the run stands, as the launcher does, which changes nothing.
Without a terminal it writes a line a step. It ends with the run, or by Ctrl-C, which ends nothing else. The exit code
of `status` is 0 where the run goes on or has finished, 1 where it has failed or its replay does not answer.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.errors import InputMissing
from configs.loading import ConfigError, load
from configs.schema import Config
from learner.record.metrics import FILE
from replay.channel import ChannelError
from replay.status_client import ask_replay
from slipstream.launch.children import RowTail
from slipstream.runtime.ending import read
from slipstream.runtime.hang import registry
from slipstream.runtime.program import program
from slipstream.view.live_text import waiting_text
from slipstream.view.live_view import LiveView
from slipstream.view.logs import Warnings

LOOK_S = 1.0
ANSWER_S = 1.0
SILENT_LOOKS = 10
"""Times in a row that replay does not answer before its run counts as over: it may be starting again."""


class Folder:
    """A run folder, as far as it was read."""

    def __init__(self, folder: Path) -> None:
        self.path, self.config = folder, _config(folder)
        self._metrics = RowTail(folder / FILE)
        self._warnings = Warnings(folder / "logs")
        self._address = ""

    def rows(self) -> list[dict[str, Any]]:
        """Those that came since the last call."""
        return self._metrics.new_rows()

    def events(self) -> Iterator[str]:
        """Errors and guards of all processes since the last call, each once; at first, of the end of each log."""
        for line in self._warnings.new():
            if line.level != "WARNING" or line.text.startswith("guard: "):
                yield f"{line.file.removesuffix('.log')}: {line.text[:200]}"

    def status(self) -> dict[str, Any] | None:
        """Replay's, None where it does not answer. Raises ChannelError: it refuses the keys of this node."""
        noted = registry.member(self.path, "replay")
        self._address = (noted.replay if noted is not None else None) or self._address
        answer = ask_replay(self._address, self.config.network.keys, ANSWER_S) if self._address else None
        return None if answer is None else answer.state

    def silence(self) -> tuple[str, bool]:
        """Why there is no status: how the run has ended, where its launcher could say it; and whether that is well."""
        if (ending := read(self.path)) is not None:
            return ending.said, not ending.failed
        where = f"replay at {self._address} does not answer" if self._address else "replay has noted no address"
        return f"{where}: the run has ended, or runs on another machine", False

    def line(self) -> tuple[str, bool]:
        """What a person asks first, and whether all is well. Raises ChannelError: replay refuses this node's keys."""
        status = self.status()
        if status is None:
            return self.silence()
        return f"version {status['version']}: {waiting_text(status)}", not status.get("failed")


def _config(folder: Path) -> Config:
    if not (folder / "config.yaml").is_file():
        raise InputMissing(f"{folder}/config.yaml is missing; name the folder of a run, such as runs/quickstart")
    return load(folder / "config.yaml")


def watch(folder: Folder, view: LiveView, *, once: bool) -> None:
    """Show the run until it ends, or once."""
    silent = 0
    while True:
        status = folder.status()
        silent = 0 if status is not None else silent + 1
        over = status is not None and bool(status.get("ended"))
        if silent and (once or silent >= SILENT_LOOKS or not view.status):
            status, over = {**view.status, "waits": [], "ended": folder.silence()[0]}, True
        for event in folder.events():
            view.event(event)
        rows = folder.rows()
        for row in rows[:-1] if once else ():  # the present state, not the way there
            view.progress.add(row)
        rows = rows[-1:] if once else rows
        view.update(status if status is not None else view.status, rows)
        if once or over:
            view.say_waits()
        if over or once:
            view.close(str(status["ended"]) if over and status else "")
            return
        time.sleep(LOOK_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 where there is no run."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.top"), description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder, such as runs/quickstart")
    parser.add_argument("--once", action="store_true", help="show the present state and end")
    parser.add_argument("--plain", action="store_true", help="a line a step, also on a terminal")
    parser.add_argument("--line", action="store_true", help="say in one line how the run stands (slipstream status)")
    args = parser.parse_args(argv)
    try:
        folder = Folder(args.run_dir)
        if args.line:
            said, is_well = folder.line()
            sys.stdout.write(said + "\n")
            return 0 if is_well else 1
        begun = (args.run_dir / "config.yaml").stat().st_mtime
        view = LiveView(folder.config, "plain" if args.plain else "auto", age_s=max(0.0, time.time() - begun))
        watch(folder, view, once=args.once)
    except (ConfigError, ChannelError) as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
