"""What processes use: slopes that are robust, leaks that are named, one number a name, the endpoint for Prometheus."""

import itertools
import json
import logging
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.base import ConfigError
from configs.loading import load
from configs.schema import Config
from slipstream.runtime.vitals import device as vitals_device
from slipstream.runtime.vitals.catalogue import catalogue, find
from slipstream.runtime.vitals.endpoint import exported_name
from slipstream.runtime.vitals.growth import MIB, STEADY, Series, growth
from slipstream.runtime.vitals.latency import UpdateLatency
from slipstream.runtime.vitals.merging import merged
from slipstream.runtime.vitals.processes import Use, by_role
from slipstream.runtime.vitals.watch import Vitals, nothing
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "docs" / "reference" / "grafana.json"
HOUR = 3600.0


def config(folder: Path, *settings: str) -> Config:
    return load("quickstart", [f"run.dir={folder}", "run.name=a", *settings])


# ---- slopes -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    slope=st.floats(-1000, 1000),
    level=st.floats(0, 1e6),
    share=st.floats(0, 1),
    size=st.floats(0, 1e6),
    seed=st.integers(0, 1000),
)
def test_a_slope_is_what_is_kept_whatever_comes_and_goes(slope, level, share, size, seed):
    """Two thirds of all samples may have any amount more, for a moment."""
    times = [10.0 * number for number in range(180)]
    values = [level + slope * now / HOUR for now in times]
    for number, drawn in enumerate(np.random.default_rng(seed).random(180)):
        if number % 15 > 4 and drawn < share:  # a block keeps samples without
            values[number] += size * float(drawn)
    found = growth(times, values)
    assert found is not None
    assert found.per_hour == pytest.approx(slope, rel=0.3, abs=1e-3 * max(level, 1))


def series_of(values: list[float], limit: float = 100.0) -> list[float]:
    """Times at which a series of one sample each 10 s names a leak, with a window of 30 minutes."""
    series = Series(1800.0, limit)
    named = []
    for number, value in enumerate(values):
        series.add(10.0 * number, value)
        if number % 6 == 0 and series.is_leak(series.growth(), 10.0 * number):
            named.append(10.0 * number)
    return named


def test_what_grows_without_end_is_named_once_a_window_and_what_comes_and_goes_is_not():
    rng = np.random.default_rng(0)
    hours = np.arange(1080) / 360  # three hours
    noise = rng.exponential(200, 1080)
    assert series_of((1000 + 150 * hours + noise).tolist()) != []
    named = series_of((1000 + 150 * hours).tolist())
    assert named == [3600.0, 5400.0, 7200.0, 9000.0]
    assert series_of((1000 + noise).tolist()) == []
    assert series_of((1000 + 90 * hours).tolist()) == [], "slower than the limit"
    assert series_of((1000 + 500 * (hours % 0.25)).tolist()) == [], "a saw tooth is given back"
    for jump in np.linspace(0.6, 1.4, 9):  # an evaluation comes once, and stays
        assert series_of((1000 + 800 * (hours > jump)).tolist()) == []
    assert series_of((1000 + 3000 * np.minimum(hours, 0.5)).tolist()) == [], "it warms up"


def test_a_steady_series_has_a_tau_of_one_and_too_short_a_one_has_none():
    times = [float(number) for number in range(48)]
    assert growth(times, times).steadiness == 1.0 > STEADY
    assert growth(times[:23], times[:23]) is None and growth([1.0] * 48, times) is None


# ---- leaks ------------------------------------------------------------------------------------------------

LEAKY = """
import os, sys, threading, time
what, rate = sys.argv[2], 0.01
kept = []
while True:
    if what == "memory":
        kept.append(b"x" * 300_000)
    elif what == "descriptors":
        kept.append(os.dup(0))
    elif what == "threads":
        kept.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
        kept[-1].start()
    time.sleep(rate)
"""


@pytest.fixture
def leaky() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, what: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", LEAKY, module, what], stdin=subprocess.DEVNULL))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_planted_leak_is_named_with_role_and_process(tmp_path, leaky, caplog):
    """Real processes, and a clock of the test's: a busy machine takes samples late. Runs: tests/e2e/test_leaks.py."""
    caplog.set_level(logging.WARNING)
    pids = {what: leaky(f"a.{what}.worker", what) for what in ("memory", "descriptors", "threads", "nothing")}
    modules, clock = {f"a.{what}.worker": f"{what}_role" for what in pids}, itertools.count()
    watch = Vitals(config(tmp_path, "limits.growth_window_s=60"), "rollout-0", "rollout", modules=modules, others="x")
    growing = [
        rf"leak: {what}_role processes of 'rollout-0' \(1, pid {pids[what]} has most\): {what} grows? by \d+"
        for what in ("memory", "descriptors", "threads")
    ]

    def all_are_named() -> bool:
        watch.sample(float(next(clock)), by_role(psutil.Process(), "rollout", modules, "x"), {})
        return all(any(re.match(where, text) for text in caplog.messages) for where in growing)

    until(all_are_named, "all are named")
    gauges, said = watch.gauges(), caplog.messages
    assert not any("nothing_role" in text for text in said)
    assert gauges["vitals/memory_mib_per_h/memory_role"] > 256 < gauges["vitals/descriptors_per_h/descriptors_role"]
    lines = [json.loads(line) for line in (tmp_path / "a/vitals/rollout-0.jsonl").read_text().splitlines()]
    # "x": what else this process of tests has started
    assert {line["role"] for line in lines} - {"x"} == {"rollout", *(f"{what}_role" for what in pids)}
    leaking = [line["memory_bytes"] for line in lines if line["role"] == "memory_role"]
    assert leaking[-1] > leaking[0] + 2 * MIB and all(line["cpu_s"] >= 0 for line in lines)


def test_device_memory_is_judged_too(tmp_path, caplog):
    """A stand-in for the device alone: this test needs no GPU."""
    watch = Vitals(config(tmp_path, "limits.growth_window_s=60"), "learner-0", "learner")
    for number in range(400):
        device = {"device_memory_bytes": 1e9 + 1e6 * number, "gpu_utilization": 0.5}
        watch.sample(float(number), {"learner": Use(1, 10**8, 10, 2)}, device)
    gauges = watch.gauges()
    assert gauges["vitals/gpu_utilization/learner"] == 0.5
    assert gauges["vitals/device_memory_mib_per_h/learner"] == pytest.approx(3600e6 / MIB, rel=0.01)
    assert gauges["vitals/memory_mib_per_h/learner"] == 0 and gauges["vitals/leaks"] >= 1
    assert "leak: learner 'learner-0'" in caplog.text and "device memory grows by 3433 MiB an hour" in caplog.text
    assert nothing() == {}


class NVMLError(Exception):
    """As pynvml's, which is no RuntimeError."""


class Cuda:
    """Stands in for torch.cuda on a GPU that has memory and no utilization, as one with MIG."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def utilization(self, device: int) -> int:
        raise NVMLError("Not Supported")


def gauges_of(watch: Vitals, name: str) -> dict[str, float]:
    """Once they have that name and another sample has been taken; the thread lives."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and name not in watch.gauges():
        time.sleep(0.01)
    first = watch.gauges()
    while time.monotonic() < deadline and watch.gauges() is first:
        time.sleep(0.01)
    assert watch.gauges() is not first
    return watch.gauges()


def test_a_gpu_whose_utilization_cannot_be_read_is_said_once_and_its_memory_is_measured(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(vitals_device, "_silent", False)
    caplog.set_level(logging.INFO)
    with Vitals(
        config(tmp_path, "limits.growth_window_s=1"),
        "learner-0",
        "learner",
        device=lambda: vitals_device.readings(Cuda(), [0], lambda _: 2**30),
    ) as watch:
        found = gauges_of(watch, "vitals/device_memory_gib/learner")
    assert found["vitals/device_memory_gib/learner"] == 1.0 and found["vitals/memory_gib/learner"] > 0
    assert "vitals/gpu_utilization/learner" not in found
    assert caplog.messages == ["GPU utilization is not measured: NVMLError: Not Supported"]


def test_a_sample_that_fails_is_named_and_the_next_one_is_taken(tmp_path, caplog, monkeypatch):
    def of_a_lost_gpu() -> dict[str, float]:
        raise NVMLError("GPU is lost")

    failures = iter([OSError("too many open files")])

    def once_broken(*asked: Any) -> dict[str, Use]:
        for error in failures:
            raise error
        return by_role(*asked)

    monkeypatch.setattr("slipstream.runtime.vitals.watch.by_role", once_broken)
    with Vitals(config(tmp_path, "limits.growth_window_s=1"), "learner-0", "learner", device=of_a_lost_gpu) as watch:
        assert gauges_of(watch, "vitals/memory_gib/learner")["vitals/memory_gib/learner"] > 0
    said = set(caplog.messages)
    assert "vitals: a sample is left out: OSError: too many open files" in said
    assert "vitals: a sample lacks the device: NVMLError: GPU is lost" in said and len(said) == 2


# ---- one number a name ------------------------------------------------------------------------------------


def test_of_many_processes_the_most_counts_and_of_utilization_the_mean():
    one = {"vitals/leaks": 1.0, "vitals/gpu_utilization/learner": 0.2, "tokens_per_s": 5.0}
    other = {"vitals/leaks": 0.0, "vitals/gpu_utilization/learner": 0.6, "vitals/threads/replay": 3.0}
    expected = {"vitals/leaks": 1.0, "vitals/gpu_utilization/learner": 0.4, "vitals/threads/replay": 3.0}
    assert merged([one, other]) == pytest.approx(expected)


def test_an_update_takes_until_the_last_server_serves_it():
    latency = UpdateLatency()
    assert not latency.waits and latency.metrics() == {}
    for version, now in ((1, 10.0), (2, 11.0), (3, 12.0)):
        latency.announced(version, now)
    latency.serve(0, 12.5)
    assert latency.waits and latency.metrics() == {}
    latency.serve(2, 13.0)  # version 1 was passed over by a server that got 2 at once
    assert latency.metrics() == {"weight_sync/update_latency_s": 2.0, "weight_sync/update_latency_version": 2.0}
    latency.serve(3, 16.0)
    assert latency.metrics()["weight_sync/update_latency_s"] == 4.0 and not latency.waits


# ---- Prometheus -------------------------------------------------------------------------------------------


def test_an_endpoint_serves_numbers_with_labels_and_leaves_no_target_behind(tmp_path):
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    target = tmp_path / "a" / "prometheus" / "learner-0.json"
    with Vitals(config(tmp_path, "tracking.prometheus=127.0.0.1"), "learner-0", "learner") as watch:
        (found,) = json.loads(target.read_text())
        watch.sample(1.0, {"learner": Use(1, 2**30, 17, 4)}, {})
        shown = {"critic/score/mean": 0.5, "training/lag_histogram": {"0": 3, "1": 4}, "rollout/groups/s-1": 9.0}
        watch.show({**shown, "prompts/level": 1.0, "prompts/level/sums": 2.0, "text": "not a number"})
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = without_proxy.open(f"http://{found['targets'][0]}/metrics", timeout=10).read().decode()
    labels = 'process="learner-0",role="learner",run="a"'
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    samples = {
        re.sub(r"\{(.*)\}", lambda m: "{" + ",".join(sorted(m[1].split(","))) + "}", k): v for k, v in samples.items()
    }
    assert samples[f"slipstream_critic_score_mean{{{labels}}}"] == "0.5"
    assert samples[f'slipstream_training_lag_histogram{{key="1",{labels}}}'] == "4.0"
    assert samples[f'slipstream_rollout_groups{{{labels},server="s-1"}}'] == "9.0"
    assert samples[f"slipstream_vitals_memory_gib{{{labels}}}"] == "1.0"
    assert found["targets"][0].startswith("127.0.0.1:") and found["labels"]["role"] == "learner"
    assert not target.exists() and "slipstream_text" not in text
    assert text.count("# TYPE slipstream_prompts_level gauge") == 1


@pytest.mark.parametrize(
    ("bound", "target"),
    [
        ("::1", "[::1]:9"),
        ("127.0.0.1", "127.0.0.1:9"),
        ("0.0.0.0", "gpu7:9"),
        ("::", "gpu7:9"),
        ("10.0.0.7", "10.0.0.7:9"),
    ],
)
def test_a_target_is_written_as_prometheus_of_another_host_reads_it(tmp_path, monkeypatch, bound, target):
    client = pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    server = SimpleNamespace(server_port=9, shutdown=lambda: None, server_close=lambda: None)
    monkeypatch.setattr(client, "start_http_server", lambda *_, **__: (server, None))  # IPv6 may be off here
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7")
    with Vitals(config(tmp_path, f"tracking.prometheus='{bound}'", "network.insecure=true"), "replay", "replay"):
        (found,) = json.loads((tmp_path / "a" / "prometheus" / "replay.json").read_text())
    assert found["targets"] == [target] and found["labels"]["host"] == "gpu7"


def test_without_an_address_nothing_listens_and_a_wrong_one_is_refused(tmp_path):
    with Vitals(config(tmp_path), "replay", "replay") as watch:
        assert not watch.is_served
    assert not (tmp_path / "a" / "prometheus").exists()
    with pytest.raises(ConfigError, match=r"tracking\.prometheus: '10\.1\.2\.3' leaves the loopback interface"):
        config(tmp_path, "tracking.prometheus=10.1.2.3")
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    with pytest.raises(ConfigError, match=r"tracking\.prometheus: '192\.0\.2\.1' cannot be served"):
        elsewhere = config(tmp_path, "tracking.prometheus=192.0.2.1", "network.insecure=true")
        Vitals(elsewhere, "replay", "replay").__enter__()


def test_queries_of_the_grafana_dashboard_are_of_metrics_that_are_there():
    names = {exported_name(metric.name)[0]: metric for metric in catalogue()}
    panels = json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 20
    for query in queries:
        found = re.findall(r"(slipstream_\w+)\{([^}]*)\}", query)
        assert found and len(found) == query.count("slipstream_"), f"{query}: name labels, at least run"
        for name, labels in found:
            assert name in names, f"{query}: no metric is exported as {name}"
            known = {"run", "role", "process", "key", *(names[name].variables(names[name].name) or {})}
            assert 'run="$run"' in labels and set(re.findall(r"(\w+)=", labels)) <= known, query


def test_each_name_has_one_entry():
    assert find("rollout/groups/rollout-0").name == "rollout/groups/<server>"
    assert find("val-core/math/reward/pass@4").name == "val-core/<set>/reward/pass@<k>"
    assert find("val-core/math/greedy").variables("val-core/math/greedy") == {"set": "math", "mode": "greedy"}
    assert find("weight_sync/bytes").name == "weight_sync/bytes" and find("weight_sync/gather_s").unit == "s"
    assert find("no/such/metric") is None
