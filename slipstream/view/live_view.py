"""What the launcher shows in the terminal: a panel that redraws itself, a line per step, or nothing.

The words are made in slipstream/view/live_text.py; this module draws them. It imports no torch, and it never ends a
run: when the reader of the output goes away, or its disk is full, the view goes silent.
"""

import contextlib
import errno
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from configs.errors import CODE, coded
from configs.schema import Config
from learner.record.metrics import evaluation_scores
from slipstream.launch.terminal import EVENTS, encode_anything, silence, write_line
from slipstream.view import live_text
from slipstream.view.live_text import MetricRows, Row, Status

log = logging.getLogger(__name__)

Mode = Literal["auto", "rich", "plain", "off"]

REDRAW_S = 0.25
QUIET_S = 15.0
"""Plain mode: after so long without a line, one that names what is waited for."""
EVENTS_SHOWN = 4
NARROW = 100
"""Columns below which the panel leaves out what stands in WIDE, so that nothing is cut at 80."""
WIDE = ("for", "heard", "leases", "groups")
STYLES = {"waiting": "magenta", "split": "yellow", "warning": "red", "trouble": "red"}
LINES_ABOVE = 20
"""Of the panel without peers."""


class _Console(Console):
    """A console that leaves it to us what a closed pipe means; rich would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class LiveView:
    """One run in the terminal. Called by the launcher a few times a second."""

    def __init__(self, config: Config, mode: Mode, console: Console | None = None, *, age_s: float = 0.0) -> None:
        """Draw nothing yet; on stdout by default. `auto` is `rich` on a terminal and `plain` elsewhere.

        `age_s`: of a run that began before this view.
        """
        self.console = console or _Console()
        encode_anything(self.console.file)
        interactive = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode = ("rich" if interactive else "plain") if mode == "auto" else mode
        self.progress = MetricRows(config.learner.total_steps, config.replay.async_lag, split=_split(config))
        self.status: Status = {}
        self.events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self.warning = ""
        """The newest event that has a code; later ones without a code do not replace it."""
        self._name = config.run.name
        self._drawn = self._last_line = time.monotonic()
        self._started = self._drawn - age_s
        self._live: Live | None = None

    def update(self, status: Status | None, rows: Sequence[Row]) -> None:
        """Show replay's status, None before it has answered, and the rows of metrics.jsonl since the last call."""
        self.status = status or {}
        self.progress.async_lag = self.status.get("async_lag", self.progress.async_lag)  # guards may lower it
        for row in rows:
            self.progress.add(row)
            if self.mode == "plain" and "step" in row:
                self._line(live_text.step_line(self.progress))
            elif self.mode == "plain" and evaluation_scores(row):
                self._line(live_text.evaluation_line(row))
        now = time.monotonic()
        if self.mode == "plain" and now - self._last_line >= QUIET_S:
            self._line(live_text.waiting_text(self.status))
        if self.mode == "rich" and (rows or self._live is None or now - self._drawn >= REDRAW_S):
            self._draw("")

    def event(self, text: str) -> None:
        """Say something that happened beside the steps, such as a rollout server that died."""
        text = coded(text, "")
        EVENTS.warning("%s", text)
        self.warning = text if CODE.search(text) else self.warning
        self.events.append(f"{live_text.duration(time.monotonic() - self._started)}  {text}")
        if self.mode == "plain":
            self._line(text)
        elif self.mode == "rich":
            self._draw("")

    def say_waits(self) -> None:
        """In plain mode, say now which process waits for what; the panel shows it always."""
        if self.mode == "plain":
            self._line(live_text.waiting_text(self.status))

    def close(self, summary: str) -> None:
        """Show the last state and what the run came to. `summary` says how it ended."""
        closing = "\n".join(filter(None, (live_text.closing_line(self.progress), live_text.split_text(self.progress))))
        if self.mode == "plain" and closing:
            self._line(closing)
        elif self.mode == "rich":
            self._draw("\n".join(filter(None, (summary, closing))) or "closed")
        self._live = None
        self.mode = "off"

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        if error := write_line(self.console.file, text):
            self._go_silent(error)

    def _go_silent(self, error: OSError) -> None:
        self.mode = "off"
        silence(self.console.file)
        if self._live is not None:
            with contextlib.suppress(OSError):  # of a file without a descriptor
                self._live.stop()  # gives stdout and stderr back
            self._live = None
        said = f"the output was closed or is full ({error.strerror or error}); the run goes on without a live view"
        EVENTS.warning("%s", said)
        log.warning("%s", said)

    def _draw(self, ending: str) -> None:
        self._drawn = time.monotonic()
        drawing = self._panel(ending)
        try:
            if self._live is None:
                self._live = Live(drawing, console=self.console, auto_refresh=False, vertical_overflow="visible")
                self._live.start(refresh=True)
            else:
                self._live.update(drawing, refresh=True)
            if ending:
                self._live.stop()
        except OSError as error:
            self._go_silent(error)

    def _panel(self, ending: str) -> Panel:
        """Facts, peers, events, and how the run ended."""
        parts: list[Any] = [self._facts(over=bool(ending))]
        if peers := live_text.peer_rows(self.progress, self.status):
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
            shown = [name not in WIDE or self.console.width >= NARROW for name in live_text.PEER_COLUMNS]
            for column in itertools.compress(live_text.PEER_COLUMNS, shown):
                words = column in ("peer", "doing")
                table.add_column(column, justify="left" if words else "right", no_wrap=column != "doing")
            above = LINES_ABOVE + (2 if self.warning else 0)
            rows = max(3, self.console.height - above)  # rich draws what is taller than the terminal again below
            for row in peers[:rows]:
                table.add_row(*map(Text, itertools.compress(row, shown)))
            parts += [Text(), table, *([Text(f"and {len(peers) - rows} more")] if len(peers) > rows else [])]
        if self.events:
            parts += [Text(), *(Text(event, style="bold") for event in self.events)]
        if ending:
            parts += [Text(), Text(ending, style="bold")]
        version = self.status.get("version", self.progress.step)
        elapsed = live_text.duration(self._drawn - self._started)
        return Panel(
            Group(*parts),
            title=f"[bold]slipstream[/bold] · {self._name} · version {version} · {elapsed}",
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
        )

    def _facts(self, *, over: bool) -> Table:
        progress = self.progress
        steps = Table.grid(padding=(0, 2))
        eta = f"eta {live_text.duration(progress.eta_s())}" if progress.step < progress.total_steps else "done"
        bar = ProgressBar(
            total=progress.total_steps, completed=progress.step, width=max(10, min(40, self.console.width - 50))
        )
        steps.add_row(bar, Text(f"{progress.step}/{progress.total_steps}"), Text(eta))
        rewards = [row.get(live_text.worth_of(row)) for row in progress.steps]
        reward = Text(live_text.number(rewards[-1] if rewards else None))
        reward.append(f"  {live_text.sparkline(rewards, max(10, min(60, self.console.width - 30)))}", style="green")
        facts = live_text.facts(progress, self.status)
        if over:
            del facts["waiting"]
        if found := CODE.search(self.warning):
            facts["warning"] = f"{self.warning}; slipstream explain {found[1]}"
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1)
        table.add_row("step", steps)
        table.add_row(live_text.title_of(progress.last), reward)
        for name, fact in facts.items():
            table.add_row(name, Text(fact, style=STYLES.get(name, "")))
        return table


def _split(config: Config) -> tuple[int, int] | None:
    """GPUs of each side that placement.split divides; None on a CPU, over several nodes and where they are shared."""
    placement = config.placement
    if placement.device == "cpu" or placement.split is None or placement.share_gpus or config.num_rollout_devices < 1:
        return None
    return config.num_rollout_devices, config.num_learner_ranks
