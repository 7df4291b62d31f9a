"""Watches what this process and its children use, from a thread of its own; names what grows without end or is full.

Every role has one. Per role of its processes it appends a line a minute to vitals/<name>.jsonl of the run folder:

    {"time": 1760000000.0, "pid": 4711, "role": "reward", "processes": 4, "memory_bytes": 190000000, "descriptors": 40,
     "threads": 8, "cpu_s": 12.5, "largest": 4720}

A leak is a line of the log that begins with `leak:`, workers that hold all others up one with `busy:`; the launcher
shows them. Imports no torch: what a device says comes from the caller.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import psutil

from configs.schema import Config
from slipstream.runtime.lifeline import BoundedLog
from slipstream.runtime.vitals.busy import Busy
from slipstream.runtime.vitals.endpoint import MetricsEndpoint
from slipstream.runtime.vitals.growth import COUNT_PER_H, MIB, Growth, Series
from slipstream.runtime.vitals.processes import Use, by_role

log = logging.getLogger(__name__)

FOLDER = "vitals"
SAMPLE_S = 10.0
SAMPLES = 60
"""At least in a window."""
WRITE_S = 60.0
GIB = 2**30
Device = Callable[[], Mapping[str, float]]
"""`device_memory_bytes` and `gpu_utilization` (share) of this process's GPU, where it has one."""


def names_of(quantity: str, role: str) -> tuple[str, str, int, int]:
    """Names of a quantity and of its growth an hour, and the units of both."""
    match quantity:
        case "memory":
            return f"vitals/memory_gib/{role}", f"vitals/memory_mib_per_h/{role}", GIB, MIB
        case "device_memory":
            return f"vitals/device_memory_gib/{role}", f"vitals/device_memory_mib_per_h/{role}", GIB, MIB
        case "descriptors":
            return f"vitals/descriptors/{role}", f"vitals/descriptors_per_h/{role}", 1, 1
    return f"vitals/threads/{role}", f"vitals/threads_per_h/{role}", 1, 1


def nothing() -> Mapping[str, float]:
    """Of a process without a device."""
    return {}


class Vitals(AbstractContextManager["Vitals"]):
    """One process's watch; ends with its context.

    Raises ConfigError: tracking.prometheus cannot be served.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        role: str,
        *,
        modules: Mapping[str, str] | None = None,
        others: str | None = None,
        device: Device = nothing,
    ) -> None:
        """Args: as `by_role`; `name` is the process's in logs; `device` is called from the thread."""
        window = config.limits.growth_window_s
        self._name, self._role, self._modules, self._others = name, role, modules or {}, others
        self.device, self._window = device, window
        """May be set later: by a process that is not to import torch in this thread first."""
        self._limits = {"memory": config.limits.growth_mib_per_h * MIB, "descriptors": COUNT_PER_H}
        self._limits |= {"threads": COUNT_PER_H, "device_memory": config.limits.growth_mib_per_h * MIB}
        self._every = min(SAMPLE_S, window / SAMPLES)
        self._path = Path(config.run_dir) / FOLDER / f"{name}.jsonl"
        self._series: dict[tuple[str, str], Series] = {}
        self._gauges: dict[str, float] = {}
        self._leaks = 0
        self._busy = Busy(config)
        self._written = float("-inf")
        self._log = BoundedLog(log)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)
        self._endpoint = MetricsEndpoint(config, name, role, self.gauges)

    def __enter__(self) -> Self:
        self._endpoint.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._endpoint.close()

    @property
    def is_served(self) -> bool:
        """Whether `show` has any effect."""
        return self._endpoint.is_served

    def gauges(self) -> dict[str, float]:
        """`vitals/<quantity>/<role>` of the last sample, and growth an hour once it is known."""
        return self._gauges

    def show(self, values: Mapping[str, object]) -> None:
        """Serve these numbers, under their names in metrics.jsonl, at the process's endpoint, if it has one."""
        self._endpoint.show(values)

    def _run(self) -> None:
        me = psutil.Process()
        while not self._over.wait(self._every):
            device = self._ask_device()
            try:
                self.sample(time.monotonic(), by_role(me, self._role, self._modules, self._others), device)
            except Exception as error:  # noqa: BLE001 - one that ends the thread ends the search for leaks, too
                self._log.warning("sample", "vitals: a sample is left out: %s: %s", type(error).__name__, error)

    def _ask_device(self) -> Mapping[str, float]:
        """What the device says; nothing where asking it fails, which is no reason to miss the rest of the sample."""
        try:
            return self.device()
        except Exception as error:  # noqa: BLE001 - NVIDIA's libraries have plain Exceptions
            self._log.warning("device", "vitals: a sample lacks the device: %s: %s", type(error).__name__, error)
            return {}

    def sample(self, now: float, used: Mapping[str, Use], device: Mapping[str, float]) -> None:
        """Take one sample in: gauges, the file, and what leaks."""
        gauges: dict[str, float] = {}
        for role, use in used.items():
            quantities = {"memory": use.memory_bytes, "descriptors": use.descriptors, "threads": use.threads}
            if role == self._role and "device_memory_bytes" in device:
                quantities["device_memory"] = int(device["device_memory_bytes"])
            if role == self._role and "gpu_utilization" in device:
                gauges[f"vitals/gpu_utilization/{role}"] = device["gpu_utilization"]
            for quantity, value in quantities.items():
                gauges |= self._judge(now, role, quantity, float(value), use)
        times = psutil.cpu_times()
        full, lines = self._busy.judge(now, times.idle + getattr(times, "iowait", 0.0), used)
        for line in lines:
            log.warning("busy: %r: %s", self._name, line)
        self._gauges = gauges | full | {"vitals/leaks": float(self._leaks)}
        if now - self._written >= min(WRITE_S, self._window / 30):
            self._written = now
            self._write(used, device)

    def _judge(self, now: float, role: str, quantity: str, value: float, use: Use) -> dict[str, float]:
        """Gauges of one quantity of one role; a leak is logged."""
        limit = self._limits[quantity]
        series = self._series.setdefault((role, quantity), Series(self._window, limit))
        series.add(now, value)
        found = series.growth()
        if found is not None and series.is_leak(found, now):
            self._leaks += 1
            log.warning("%s", self._sentence(role, quantity, found, use))
        name, hourly, unit, unit_per_h = names_of(quantity, role)
        gauges = {name: value / unit}
        if found is not None:
            gauges[hourly] = found.per_hour / unit_per_h
        return gauges

    def _sentence(self, role: str, quantity: str, leak: Growth, use: Use) -> str:
        """`leak: reward processes of 'rollout-0' (pid 4711 has most): memory grows by 512 MiB an hour ...`"""
        if role == self._role:
            where = f"{role} {self._name!r} (pid {os.getpid()})"
        else:
            where = f"{role} processes of {self._name!r} ({use.processes}, pid {use.largest} has most)"
        span = f"over the last {self._window / 60:.3g} min"
        if quantity in ("memory", "device_memory"):
            size = f"{leak.per_hour / MIB:.0f} MiB an hour {span}, to {leak.now / MIB:.0f} MiB now"
            return f"leak: {where}: {quantity.replace('_', ' ')} grows by {size}"
        return f"leak: {where}: {quantity} grow by {leak.per_hour:.0f} an hour {span}, to {leak.now:.0f} now"

    def _write(self, used: Mapping[str, Use], device: Mapping[str, float]) -> None:
        lines = []
        for role, use in used.items():
            line = {"time": round(time.time(), 3), "pid": os.getpid(), "role": role, "processes": use.processes}
            line |= {"memory_bytes": use.memory_bytes, "descriptors": use.descriptors, "threads": use.threads}
            line |= {"cpu_s": round(use.cpu_s, 2), "largest": use.largest, **(device if role == self._role else {})}
            lines.append(json.dumps(line) + "\n")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            self._log.warning("vitals", "%s: %d lines are left out: %s", self._path, len(lines), error)
