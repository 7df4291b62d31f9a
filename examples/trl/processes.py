"""Replay and the rollout servers of a run under TRL: started and watched over as by the launcher, in a thread.

TRL's process is the launcher and the learner in one. Everything that it starts is killed with it by the kernel; what
a restart cannot mend ends the run with one line, which TRL's next wait raises.
"""

import os
import shutil
import threading
from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from slipstream.launch.children import Child
from slipstream.launch.launcher import FAREWELL_S, Launcher
from slipstream.launch.learner.ranks import RankGroup
from slipstream.launch.servers import RunFailed
from slipstream.launch.terminal import say
from slipstream.view.live_view import LiveView

TORCHRUN_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
"""Of TRL's own process group, when `accelerate launch` started it; a rollout server must not join that."""
MARGIN_S = 15.0


class ThisProcess(Child):
    """The learner, which is this process: it runs until `over` is set."""

    over = False

    def __init__(self) -> None:
        """Nothing was started."""
        self.name = "learner-0"

    @property
    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def exit_code(self) -> int | None:
        """0 once TRL has ended."""
        return 0 if self.over else None


class Events(LiveView):
    """Says what happens beside the steps; the steps are TRL's to show."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, "off")

    def event(self, text: str) -> None:
        """One line on standard error."""
        say(text)


class LauncherBeside(Launcher):
    """A launcher whose learner is this process, which it neither starts nor ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.here = ThisProcess()

    def _start_ranks(self) -> None:
        self.learner = RankGroup(self._generations.number, [self.here])

    def _failure(self) -> None:
        """TRL says itself why it ends."""

    def _learner_leaves(self) -> bool:
        return self.here.over

    def _start(self, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
        unset = [word for variable in TORCHRUN_NAMES if variable in os.environ for word in ("-u", variable)]
        if unset:
            command = [shutil.which("env") or "env", *unset, *command]
        return super()._start(name, command, environment)


class Processes:
    """The children of a run, and the thread that watches over them."""

    def __init__(self, config: Config) -> None:
        self.launcher = LauncherBeside(config, False, Events(config))
        self.failure = ""
        """Why they cannot go on, in one line; empty while they can."""
        # A daemon, so that a script which fails elsewhere can end; restarted children die with the thread that forked
        # them, so it stays until all are ended.
        self._thread = threading.Thread(target=self._watch, name="slipstream-launcher", daemon=True)

    def start(self) -> str:
        """Start replay and the rollout servers; returns replay's address. Raises RunFailed."""
        try:
            self.launcher.start()
        except BaseException:
            self.launcher.stop()
            raise
        self._thread.start()
        address = self.launcher.address
        if not self.launcher.config.placement.local_rollouts:
            say(f"replay listens at {address}: start rollout servers with --replay {address}")
        return address

    def stop(self) -> None:
        """After the learner's Goodbye: give them time to leave, and end what is left."""
        if not self._thread.is_alive():
            return
        self.launcher.here.over = True
        self._thread.join(FAREWELL_S + MARGIN_S)
        if self._thread.is_alive():
            self.launcher.stop()

    def _watch(self) -> None:
        try:
            self.launcher.watch()
            self.launcher.leave()
        except RunFailed as failure:
            self.failure = str(failure)
            say(f"run stopped: {failure}")
        finally:
            if not self.failure and not self.launcher.here.over:
                self.failure = "the thread that watches over replay and rollout servers has failed; see its traceback"
            self.launcher.stop()
