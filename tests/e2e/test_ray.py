"""A run in a Ray cluster, three raylets on this host: what is killed, how the run goes on, what the terminal says.

Each case prints a line of JSON. By default: tests/slipstream/test_ray_reach.py, without Ray.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest

from configs import load
from scripts.chaos.checker import check
from slipstream.runtime import processes as kernel
from tests.support.runs import Run, environment, free_port, left_over, patient_reward, processes, terminal
from tests.support.waiting import PATIENT_S, until

pytest.importorskip("ray", reason="ray is not installed: pip install 'slipstream-rl[ray]'")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

RAYLET = {"num_cpus": 1, "object_store_memory": 80_000_000}
STEPS = 60
SETTINGS = f"""
placement.device=cpu network.insecure=true rollout.groups_per_step=8 rollout.max_running=32 evaluation.every_steps=0
tracking.live=plain tracking.plot=false run.name=run network.heartbeat_s=0.5 network.silent_after_s=3
weight_bus.heartbeat_s=0.5 weight_bus.collective_timeout_s=2 weight_bus.deadline_s=8 rollout.restart_backoff_s=0.5
replay.journal_keep=all checkpoint.every_steps=5 learner.total_steps={STEPS}
""".split()


class Raylets:
    """A head, whose raylet takes the driver alone, and three raylets on this host.

    A test that kills one reaps it: workers take a zombie for alive.
    """

    def __init__(self, each: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> None:
        from ray.cluster_utils import Cluster

        head = {**RAYLET, "num_cpus": 0, "include_dashboard": False, **options}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address, self.web = self._cluster.address, self._cluster.webui_url
        self.session = self._cluster.head_node.get_session_dir_path()
        for _ in range(3):
            self.add(**each)

    def add(self, **options: Any) -> None:
        self._cluster.add_node(**RAYLET, **options)

    def all_of(self, kind: str) -> list[Any]:
        """The processes `raylet` or `gcs_server`, the head's first."""
        nodes = [self._cluster.head_node, *self._cluster.worker_nodes]
        return [each.process for node in nodes for each in node.all_processes.get(kind, [])]

    def close(self) -> None:
        self._cluster.shutdown()


@dataclass
class Launched:
    """A run over one learner node and two rollout nodes; `tag` is in the names of the nodes, so in their processes."""

    folder: Path
    input: Any
    raylets: Raylets
    tag: str
    go_on: Path

    @contextlib.contextmanager
    def start(self, *words: str):
        output = self.folder / f"terminal-{secrets.token_hex(2)}.out"
        command = [sys.executable, "-m", "slipstream.launch", "run", "--ray", self.raylets.address, *words]
        with terminal(output, *command, environment=environment()) as process:
            yield Run(process, self.folder / "run", output)

    def settings(self, reward: str = "") -> list[str]:
        one, two, three = self.names
        placed = [f"placement.learner={one}:0", f"placement.rollout={two}:0; {three}:0", f"run.dir={self.folder}"]
        reward = reward or patient_reward(self.folder, self.go_on, pause_s=0.03)
        own = [
            *self.input.settings,
            *SETTINGS,
            *placed,
            f"reward.function={reward}",
            f"network.replay_port={free_port()}",
        ]
        return [word for value in own for word in ("--set", value)]

    @property
    def names(self) -> list[str]:
        return [f"{self.tag}-{number}" for number in range(3)]

    def node(self, name: str) -> psutil.Process:
        """The process of a node; its parent is the actor's, whose parent is the raylet."""
        return psutil.Process(next(pid for pid, words in processes() if f"--node {name} " in words))

    def left(self) -> list[tuple[int, str]]:
        return [found for found in processes() if self.tag in found[1] or f"{self.folder}/run" in found[1]]


@pytest.fixture
def launched(tmp_path, untrained):
    made = Launched(tmp_path, untrained, Raylets(), f"n{secrets.token_hex(3)}", tmp_path / "go-on")
    try:
        yield made
    finally:
        made.raylets.close()
        for pid, _ in made.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def both_have_served(run: Run, launched: Launched) -> bool:
    keys = [f"rollout/groups/rollout-{name}-0" for name in launched.names[1:]]
    return any(all(row.get(key) for key in keys) for row in run.steps())


def step_of(run: Run) -> int:
    return max((row["training/global_step"] for row in run.steps()), default=0)


def ends_well(case: str, run: Run, launched: Launched, told: str, **seconds: float) -> None:
    """Let the run end; nothing is lost, nothing trained twice, nothing left running."""
    launched.go_on.touch()
    assert run.wait(200) == 0, run.text()[-4000:]
    assert left_over(launched.tag) == [] and left_over(f"{launched.folder}/run") == []
    report, groups = check(run.folder), run.groups()
    assert [row["training/global_step"] for row in run.steps()] == list(range(1, STEPS + 1))
    found = {"lost": len(report.lost), "twice": len(report.trained_twice), "violations": len(report.violations)}
    lines = re.findall(r"^slipstream: .*|^\[.*(?:resumes it|goes on at step) .*", told, re.MULTILINE)
    rounded = {key: round(value, 1) for key, value in seconds.items()}
    print(json.dumps({"case": case, **rounded, "groups": report.trained, **found, "terminal": lines}))
    assert report.in_order, report.as_json()
    assert len(set(groups)) == STEPS * 8


@pytest.mark.parametrize("role", ["rollout", "learner"])
@pytest.mark.parametrize("what", ["raylet", "actor"])
def test_a_lost_node_comes_back(launched, role, what):
    with launched.start(*launched.settings()) as run:
        run.wait_until(lambda: both_have_served(run, launched), "both servers", 120)
        name = launched.names[0 if role == "learner" else 1]
        actor = launched.node(name).parent()
        old, step, began = launched.node(name), step_of(run), time.monotonic()
        if what == "actor":
            actor.kill()
        else:
            raylet = next(each for each in launched.raylets.all_of("raylet") if each.pid == actor.ppid())
            raylet.kill()
            raylet.wait()
        until(lambda: (found := kernel.of(old.pid)) is None or found.state == "Z", "the end of the node's process")
        ended = time.monotonic() - began
        if role == "learner" and what == "raylet":
            launched.raylets.add()
        run.wait_for_step(step + 3, 120)  # of a rollout node: without it
        on = time.monotonic() - began
        if role == "rollout" and what == "raylet":
            launched.raylets.add()
        run.wait_until(lambda: re.search(rf"{name} \(.*\) is back after", run.text()), f"{name} is back", 120)
        told = run.text()
        assert re.search(rf"slipstream: {name} \(.*\) failed: its actor in Ray is lost: ", told), told
        ends_well(f"{what} of a {role} node", run, launched, told, ended_s=ended, on_s=on)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_run_whose_driver_is_ended_is_resumed(launched, number, code):
    with launched.start(*launched.settings()) as run:
        run.wait_until(lambda: both_have_served(run, launched), "both servers", 120)
        began = time.monotonic()
        run.process.send_signal(number)
        assert run.wait(90) == code
        until(lambda: not launched.left(), "the end of all processes", PATIENT_S)
        ended = time.monotonic() - began
    resumed(launched, f"{number.name} of the driver", run.text(), ended)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gcs_server", r"Ray's head at \S+ has been away for 20 s \[closed\]; start Ray again"),
        ("raylet", r"the raylet that this command joined Ray by is lost, and its actors with it \[closed\]"),
    ],
)
def test_a_run_whose_part_of_ray_is_lost_is_resumed(launched, kind, said):
    with launched.start(*launched.settings()) as run:
        run.wait_until(lambda: both_have_served(run, launched), "both servers", 120)
        began = time.monotonic()
        lost = launched.raylets.all_of(kind)[0]
        lost.kill()
        lost.wait()
        assert run.wait(90) == 1
        until(lambda: not launched.left(), "the end of all processes", PATIENT_S)
        ended, told = time.monotonic() - began, run.text()
    assert re.search(rf"slipstream: .*{said}", told), told
    launched.raylets.close()
    launched.raylets = Raylets()
    resumed(launched, f"{kind} of the head", told, ended)


def resumed(launched: Launched, case: str, told: str, ended_s: float) -> None:
    began = time.monotonic()
    with launched.start("--resume", str(launched.folder / "run")) as run:
        step = step_of(run)
        run.wait_for_step(step + 2, 120)
        ends_well(case, run, launched, told, ended_s=ended_s, resumed_s=time.monotonic() - began)


def test_an_actor_shows_the_gpus_of_its_role_alone():
    from slipstream.launch.reach.ray import RayReach

    settings = ["placement.learner='a:2-3'", "placement.rollout='a:0-1; b:7'", "placement.device=cuda"]
    raylets = Raylets({"num_gpus": 4})
    program = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.stdin.read()"
    try:
        reach = RayReach(raylets.address)
        hosts = reach.hosts(load("quickstart", [*settings, "network.insecure=true", "network.replay_port=5757"]))
        words = [sys.executable, "-c", program, "--role"]
        remotes = [
            reach.start(node, hosts[node], [*words, role], "\n")
            for node, role in (("a", "learner"), ("a", "rollout"), ("b", "rollout"))
        ]
        until(lambda: all(remote.output.last_line() for remote in remotes), "a line of each")
        learner, rollout, other = (remote.output.last_line().split(",") for remote in remotes)
        for remote in remotes:
            remote.close_stdin()
        until(lambda: [remote.exit_code() for remote in remotes] == [0, 0, 0], "their end in order")
        reach.close()
    finally:
        raylets.close()
    assert len(learner) == len(rollout) == 2 and not {*learner} & {*rollout}
    assert len(other) == 1


SEEN = """
import hashlib, os, pathlib

def reward(sample):
    found = hashlib.sha256(os.environ["CANARY"].encode()).hexdigest()
    (pathlib.Path({folder!r}) / f"seen-{{found}}").touch()
    return len(sample["completion"]) / 8
"""
VIEWS = ("/api/v0/actors?detail=1", "/api/v0/tasks?detail=1", "/api/v0/workers?detail=1", "/api/v0/placement_groups")
VIEWS += ("/api/jobs/", "/logical/actors", "/nodes?view=details", "/api/cluster_status", "/api/v0/runtime_envs")


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=10).is_success
    return False


def test_a_job_of_ray_runs_and_leaves_no_secret(tmp_path, untrained, monkeypatch):
    """The driver is a job on the head; what is forwarded reaches rewards, and no file, command line or view of Ray."""
    canary = f"canary-{secrets.token_hex(8)}"
    monkeypatch.setenv("CANARY", canary)
    agent = free_port()
    raylets = Raylets(include_dashboard=True, dashboard_port=free_port(), dashboard_agent_listen_port=agent)
    launched = Launched(tmp_path, untrained, raylets, f"n{secrets.token_hex(3)}", tmp_path / "go-on")
    (tmp_path / "seen.py").write_text(SEEN.format(folder=str(tmp_path)))
    words = [*launched.settings(f"{tmp_path}/seen.py:reward"), "--forward-env", "CANARY"]
    job = [sys.executable, "-m", "slipstream.launch", "run", "--ray", raylets.address, *words]
    submit = [f"{Path(sys.executable).parent}/ray", "job", "submit", "--address", f"http://{raylets.web}", "--", *job]
    texts: dict[str, str] = {}
    healthy = f"http://{raylets.address.rpartition(':')[0]}:{agent}/api/local_raylet_healthz"
    try:
        until(lambda: answers(healthy), "the agent that starts jobs", 120)
        with terminal(tmp_path / "job.out", *submit, environment=environment()) as process:
            run = Run(process, tmp_path / "run", tmp_path / "job.out")
            run.wait_for_step(3, 180)
            texts = {view: httpx.get(f"http://{raylets.web}{view}", timeout=60).text for view in VIEWS}
            texts |= {f"command of {pid}": words for pid, words in processes()}
            assert run.wait(200) == 0, run.text()[-3000:]
        files = [path for folder in (tmp_path, raylets.session) for path in Path(folder).rglob("*") if path.is_file()]
        texts |= {str(path): path.read_bytes().decode("utf-8", "replace") for path in files}
    finally:
        raylets.close()
    title = f"slipstream/run/{launched.tag}"
    actors = {*re.findall(rf"{title}[-\w]+", texts[VIEWS[0]])}
    assert actors == {f"{title}-{end}" for end in ("0-learner", "1-rollout", "2-rollout")}
    assert "succeeded" in run.text() and f"[{launched.tag}-0] slipstream: finished {STEPS} steps" in run.text()
    assert (tmp_path / f"seen-{hashlib.sha256(canary.encode()).hexdigest()}").exists(), "rewards have it"
    assert [name for name, text in texts.items() if canary in text] == []
    found = {"case": "job with a secret", "files": len(files), "views": len(VIEWS), "found_in": 0}
    print(json.dumps(found))
