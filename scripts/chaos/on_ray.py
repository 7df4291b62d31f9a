"""A cluster whose processes are launched through Ray: raylets on this host, `launch run --ray`, and a node that joins.

Nodes, and not the harness, start what has ended again. Every server reaches replay through a link of its own.
"""

import re
import socket
import sys
from functools import partial
from pathlib import Path

from scripts.chaos import processes
from scripts.chaos.cluster import LAUNCHER, SMALL, START_S, Cluster, Variant, make
from scripts.chaos.watch import Probe

SERVERS = ("rollout-a-0", "rollout-b-0")
"""Of nodes a, which is the run's, and b, which joins it."""
RAYLETS = ("head", "ray-1", "ray-2", "ray-3")
ON_RAY = "rollout.restarts=1000 rollout.restart_backoff_s=0 network.insecure=true"
LAUNCHED = {LAUNCHER: r" learner\.main ", **{name: rf" --server-name {name} " for name in SERVERS}}
"""What the command line of a process holds that a node has started."""


def _has_started(output: Path) -> bool:
    return "runtime started" in output.read_text()


class OnRay(Cluster):
    def start_small(self, variant: Variant, data: Path, total_steps: int) -> None:
        """As Cluster.start_small, with the same settings."""
        head = self._start_ray()
        ranks = "0-1" if "placement.split=2:2" in variant.settings else "0"
        own = [setting for setting in variant.settings if not setting.startswith("placement.split=")]
        port = processes.free_port()
        settings = [*self.settings(data), *SMALL.split(), *ON_RAY.split(), *own, f"learner.total_steps={total_steps}"]
        settings += [f"network.replay_port={port}", f"placement.learner=n0:{ranks}"]
        if variant.keys:
            make("replay.keys", "--out", f"{self.work}/keys", "--clients", "nodes")
            settings.append(f"network.keys={self.work}/keys")
        for name in SERVERS:
            self.links[name] = self.proxy.link(f"tcp://{head}:{port}")
            self.watch.probes[name] = Probe(self.work / "probes" / name)
        launch = (sys.executable, "-m", "slipstream.launch")
        (one, other), on_ray = self.links.values(), ("--ray", f"{head}:{self._ray_port}", "--replay")
        first = (*launch, "run", *on_ray, one.address)
        self.launch([*settings, "placement.rollout=a:0"], *first)
        more = [word for each in [*settings, "placement.rollout=b:0"] for word in ("--set", each)]
        self.start("joined", *launch, "rollout", *on_ray, other.address, *more)
        self.wait(lambda: self.history.version > 0, "the first step", 4 * START_S)

    def _start_ray(self) -> str:
        """Start a head that runs nothing and three raylets for a node each; the head's address."""
        ray, host, self._ray_port = str(Path(sys.executable).parent / "ray"), _own_address(), processes.free_port()
        small = ("--block", "--object-store-memory=80000000", f"--node-ip-address={host}", "--disable-usage-stats")
        head = ("--head", f"--port={self._ray_port}", "--num-cpus=0", "--include-dashboard=false")
        more = (f"--address={host}:{self._ray_port}", "--num-cpus=1")
        for name in RAYLETS:  # one after the other: each has a deadline of Ray's own
            self.start(name, ray, "start", *small, *(head if name == RAYLETS[0] else more))
            output = self.output(name)
            self.wait(partial(_has_started, output), f"{name} of Ray", START_S)
        return host

    def pids(self, role: str) -> list[int]:
        """As Cluster.pids, of processes that nodes have started, each below its raylet."""
        if role == "rank 1":
            return self.pids("learner")[1:2]
        found = {pid: words for name in RAYLETS for pid, words in processes.below(self.started[name].pid).items()}
        return sorted(pid for pid, words in found.items() if re.search((processes.ROLES | LAUNCHED)[role], words))


def _own_address() -> str:
    """Of this host on its network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(("203.0.113.1", 9))
        return str(found.getsockname()[0])
