"""Prometheus's endpoint of one process (extra `prometheus`), off unless tracking.prometheus names an address.

Each process takes a free port of that address, and writes it down where Prometheus looks for targets (file_sd_configs):
prometheus/<name>.json of the run folder, which several hosts may share: the label `host` tells whose loopback address
a target is, and all addresses of a host stand there as its name. What is served are numbers, to be read only.
"""

import functools
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import NoRoom, PackageMissing
from configs.schema import Config
from slipstream.runtime.vitals.catalogue import find

TARGETS = "prometheus"
NAMESPACE = "slipstream"
"""Of every sample."""
EVERY_ADDRESS = ("0.0.0.0", "::")


class MetricsEndpoint:
    """Serves the last numbers that were shown, and the gauges; from threads of its own."""

    def __init__(self, config: Config, name: str, role: str, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._host, self._gauges = config.tracking.prometheus, gauges
        self._labels = {"run": config.run.name, "role": role, "process": name}
        self._path = Path(config.run_dir) / TARGETS / f"{name}.json"
        self._shown: Mapping[str, object] = {}
        self._server: Any = None

    @property
    def is_served(self) -> bool:
        """Whether it was asked for, and has started."""
        return self._server is not None

    def start(self) -> None:
        """Serve, where it is asked for. Raises ConfigError: the package or the address is not there."""
        if self._host is None:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise PackageMissing(
                f"tracking.prometheus: {self._host}, and {error}; install the extra: pip install"
                " 'slipstream-rl[prometheus]'"
            ) from error
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(0, addr=self._host, registry=registry)
        except OSError as error:
            raise NoRoom(
                f"tracking.prometheus: {self._host!r} cannot be served on this machine ({error}); take 127.0.0.1"
            ) from error
        name = socket.gethostname()
        reached = name if self._host in EVERY_ADDRESS else self._host
        address = f"[{reached}]" if ":" in reached else reached
        target = {"targets": [f"{address}:{self._server.server_port}"], "labels": {**self._labels, "host": name}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([target]) + "\n", encoding="utf-8")

    def show(self, values: Mapping[str, object]) -> None:
        """Take the place of what was shown before: numbers by name, or maps of numbers."""
        if self._server is not None:
            self._shown = dict(values)

    def close(self) -> None:
        """Stop, and take the target back."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._path.unlink(missing_ok=True)

    def collect(self) -> Iterator[Any]:
        """Families for the client library."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, key, value in flat({**self._shown, **self._gauges()}):
            exported, label, meaning = exported_name(name)
            family = families.setdefault(exported, GaugeMetricFamily(exported, meaning))
            family.add_sample(exported, {**self._labels, **label, **key}, value)
        yield from families.values()


def flat(values: Mapping[str, object]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, label and number; of a map one for each key. What is no number is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((name, {"key": str(key)}, float(inner)) for key, inner in value.items())
        elif isinstance(value, int | float):
            yield name, {}, float(value)


@functools.lru_cache(4096)
def exported_name(name: str) -> tuple[str, Mapping[str, str], str]:
    """Name for Prometheus, the labels that a pattern of the catalogue makes of its variable parts, and the meaning.

    Example: `rollout/groups/rollout-0` is `slipstream_rollout_groups` with the label {"server": "rollout-0"}.
    """
    metric = find(name)
    fixed, labels = (name, {}) if metric is None else (metric.fixed, metric.variables(name) or {})
    exported = f"{NAMESPACE}_{re.sub(r'[^a-zA-Z0-9]+', '_', fixed).strip('_')}"
    return exported, labels, name if metric is None else metric.meaning
