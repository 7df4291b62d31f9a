"""A learner rank's part of a trace: its phases, its broadcasts, and torch's profile; readings of its GPU."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config
from learner.ranks import Ranks
from slipstream.runtime.trace import FOLDER, ClockProbe, Recorder, to_ns
from slipstream.runtime.vitals import device
from weight_bus import PublishReport

log = logging.getLogger(__name__)

STEPS, BUS = "steps", "weight bus"
"""Lanes of a rank."""
PACKING = ("gather", "encode")
"""Phases of a broadcast on the main thread, which may go on while the bus sends."""


def torch_file(run_dir: str | Path, rank: int) -> Path:
    """Where torch's profile of a rank is."""
    return Path(run_dir) / FOLDER / f"torch-{rank}.json"


def readings() -> Mapping[str, float]:
    """Memory that torch has allocated on this rank's GPU, and its utilization; nothing on a CPU."""
    return device.readings(torch.cuda, [int(os.environ.get("LOCAL_RANK", "0"))], torch.cuda.memory_allocated)


class Profile:
    """Records the steps of tracking.profile. `clock` asks replay for its clock."""

    def __init__(self, config: Config, ranks: Ranks, clock: Callable[[], ClockProbe]) -> None:
        steps = config.tracking.profiled
        self._recorder = Recorder(config.run_dir, f"learner-{ranks.rank}", "learner", steps)
        self._steps, self._clock, self._path = steps, clock, torch_file(config.run_dir, ranks.rank)
        self._torch: torch.profiler.profile | None = None
        self._step = -1

    def after(self, version: int) -> None:
        """A step has made this version, or a start has loaded it: the next step is traced, or the last one was."""
        self._step = version + 1
        self._recorder.at(self._step)
        if self._recorder.on and self._torch is None:
            probe = self._clock()
            self._recorder.clock(probe.ahead_s, probe.error_s)
            log.info("the profile of steps %d to %d begins", self._step, self._steps[-1])
            self._torch = torch.profiler.profile(record_shapes=False, with_stack=False)
            self._torch.start()
        elif not self._recorder.on:
            self.close()

    def observe(self, name: str, began: float, ended: float) -> None:
        """A phase of the step, in seconds of time.perf_counter."""
        label = f"step {self._step}" if name == "step" else name
        self._recorder.add(STEPS, label, to_ns(began), to_ns(ended))

    def broadcast(self, report: PublishReport | None) -> None:
        """What became of a version that was sent meanwhile."""
        if report is None or not self._recorder.on:
            return
        args: dict[str, Any] = {"served": len(report.served), "bytes": report.num_bytes, "epoch": report.epoch}
        for phase, began, ended in report.spans:
            lane = f"{BUS}: pack" if phase in PACKING else f"{BUS}: send"
            self._recorder.add(lane, f"{phase} of version {report.version}", to_ns(began), to_ns(ended), **args)

    def close(self) -> None:
        """Write torch's profile, if one runs: seconds, during which this rank does nothing else."""
        if self._torch is None:
            return
        profile, self._torch = self._torch, None
        started = time.monotonic()
        profile.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._path))
        except OSError as error:
            log.warning("%s: torch's profile is left out: %s", self._path, error)
        self._recorder.close()
        log.info("the profile is written after %.1f s", time.monotonic() - started)
