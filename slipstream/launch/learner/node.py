"""A learner node besides the first one: its ranks start anew with every generation, until the run is over."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configs.errors import BadHosts
from replay.channel import ChannelError
from replay.status_client import ask_replay
from slipstream.launch.learner.generations import NodeRanks, Start, read_ranks, read_start, this_process, write_ranks
from slipstream.launch.learner.ranks import RankGroup
from slipstream.launch.node_spec import NodeAssignment
from slipstream.launch.servers import EndedForGood, NodeAway
from slipstream.launch.terminal import Interrupted, ignore_signals
from slipstream.runtime import ending

POLL_S = 0.1
LOOK_S = 1.0
LAST_S = 20.0
"""The launcher of a run that is told to end has a checkpoint written first, which needs all ranks."""


class Terminal(NamedTuple):
    """Of the node: what it shows, and the end of what has started it."""

    breathe: Callable[[], None]
    """Sleep for a moment, and show new lines of the logs. Raises Interrupted."""
    follow: Callable[[Path], object]
    """Show what comes to a log from now on."""
    say: Callable[[str], object]


class LearnerNode:
    """The ranks of this node."""

    def __init__(self, assignment: NodeAssignment, run_name: str, terminal: Terminal) -> None:
        """Raises ConfigError: the run folder of the first learner node is not here."""
        self.node, self.config, self.terminal = assignment.spec.node, assignment.config, terminal
        self.run_dir = Path(self.config.run.dir) / run_name
        if not (self.run_dir / "config.yaml").is_file():
            raise BadHosts(
                f"run.dir: {self.config.run.dir!r} on {self.node} does not have run {run_name!r} of the first learner"
                " node; it must be on a file system that all learner nodes share, or checkpoints would lack this node's"
                " part"
            )
        (self._process,) = assignment.plan.of(self.node, "learner")
        self._command = [*self._process.command, "--set", f"run.name={run_name}"]
        self._replay, self._me, self._ranks = assignment.plan.replay, this_process(), RankGroup()
        self._heard_at = self._next_look = time.monotonic()

    def run(self) -> int:
        """Follow the launcher until the run is over; 0 when it ended well.

        Raises:
            EndedForGood: the run has failed, or the first learner node is away for placement.give_up_after_s.
            Interrupted: by a signal here or there.
        """
        self._take_place()
        try:
            while (ended := ending.read(self.run_dir)) is None:
                self.terminal.breathe()
                if not self._has_place():
                    raise Interrupted(f"another process of {self.node} has taken the place of this one")
                self._watch()
        except Interrupted:
            self._wait_for_checkpoint()
            raise
        finally:
            ignore_signals()
            self._ranks.end()
        if ended.failed:
            raise EndedForGood(ended.said)
        if ended.code:
            raise Interrupted(ended.said)
        return 0

    def _take_place(self) -> None:
        """Let the launcher, and an earlier process of this node, know that this one is here; it runs nothing yet."""
        before, wanted = read_ranks(self.run_dir, self.node), read_start(self.run_dir)
        if before is not None and wanted is not None and before.generation == wanted.generation:
            self._ranks.generation = wanted.generation  # its ranks are gone, and the launcher begins another one
        write_ranks(self.run_dir, self.node, NodeRanks(0, {}, self._me))

    def _has_place(self) -> bool:
        found = read_ranks(self.run_dir, self.node)
        return found is None or found.process == self._me

    def _watch(self) -> None:
        """Look once: at what the launcher wants, and at the ranks."""
        wanted = read_start(self.run_dir)
        if wanted is not None and wanted.generation != self._ranks.generation:
            if self._ranks.children:
                self.terminal.say(f"the learner starts again: ends ranks {self._ranks.generation}. start")
                self._ranks.end()
                self._ranks = RankGroup(self._ranks.generation)
            if self._replay_answers():
                self._start(wanted)
        self._ranks.note_failures()
        if self._ranks.is_running:  # they have deadlines of their own
            self._heard_at = time.monotonic()
        elif not self._replay_answers() and time.monotonic() - self._heard_at > self.config.placement.give_up_after_s:
            raise NodeAway(
                f"{self.node} has not heard of the first learner node for {self.config.placement.give_up_after_s:g} s"
                f" (placement.give_up_after_s) [silent]; start all nodes again with --resume {self.run_dir}"
            )

    def _replay_answers(self) -> bool:
        """Whether this node has the network that its ranks need; asked once a second."""
        if (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + LOOK_S
        with suppress(ChannelError):  # keys that are refused: the ranks say so
            if ask_replay(self._replay, self.config.network.keys, LOOK_S) is not None:
                self._heard_at = now
                return True
        return False

    def _start(self, wanted: Start) -> None:
        logs, places = self.run_dir / "logs", self._process.of_ranks
        for name, _ in places:
            self.terminal.follow(logs / f"{name}.log")
        resume = ["--resume"] if wanted.resumes and "--resume" not in self._command else []
        self._ranks = RankGroup.start(wanted.generation, [*self._command, *resume], places, logs)
        pids = {child.name: child.pid for child in self._ranks.children}
        write_ranks(self.run_dir, self.node, NodeRanks(wanted.generation, pids, self._me))

    def _wait_for_checkpoint(self) -> None:
        """What ends this node may end the run: its launcher needs these ranks until it has a last checkpoint."""
        deadline = time.monotonic() + LAST_S
        while self._ranks.is_running and time.monotonic() < deadline:
            wanted = read_start(self.run_dir)
            has_begun = wanted is not None and wanted.generation != self._ranks.generation
            if has_begun or not self._has_place() or ending.read(self.run_dir) is not None:
                return
            time.sleep(POLL_S)
