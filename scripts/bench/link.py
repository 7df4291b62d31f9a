"""`python -m scripts.bench link --link-mb-s 100`: an update over a slow link, whole and as changes.

The link joins two network namespaces of this machine (root, iproute2 and a kernel with veth and tbf). A publisher at
one end makes versions of real AdamW steps and sends them to a subscriber at the other, one pass for each compression;
what the subscriber holds is digested where it lies. The last line is one object of JSON; the exit code is 1 when
changes take more than --at-most of the full update's time, 2 when this machine cannot make the link.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.lifeline import die_with_parent, set_up_logging
from scripts.bench import model
from scripts.bench.bus import STEPS_BEFORE, by_kind, row_of, to_and_fro
from scripts.bench.core import CaseFailed, Processes, Row, median_of, phases, until
from scripts.chaos.report import conclude, end_on_sigterm
from weight_bus import BusClosed, Publisher, Subscriber
from weight_bus.digest import Part, slice_digests

ROLES = ("publisher", "subscriber")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "net0"
BURST = "512kb"
"""Above 256 KiB: what TCP hands down in one piece (TSO, GSO) must fit into it, or nothing passes."""
QUEUE = "8mb"
RUN, NAME = "bench-link", "engine"
FIRST_PORT = 5801
JOIN_S, MAKE_S = 60.0, 600.0
KEPT = 3
BETWEEN_S = 0.3
"""Pause between versions, so that what one leaves behind does not count for the next."""
ENOUGH = 5
"""Versions of each kind, without the first, that a median needs."""


class NoLink(RuntimeError):
    """This machine cannot make the link. The text says what is missing."""


# ---- the cable ------------------------------------------------------------------------------------------


@contextmanager
def cable(mb_s: float, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """For each end, the words that run a command there.

    Args:
        mb_s: 10^6 bytes a second in each direction.
        folder: for a file of host names.

    Raises:
        NoLink: this machine cannot make it.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoLink(f"no `{command}` command; install iproute2")
    # torch asks for the names of addresses, and there is no name server in here
    lines = ["127.0.0.1 localhost", *(f"{address} end{n}" for n, address in enumerate(ADDRESSES))]
    (folder / "names").write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = ends = [f"slip{os.getpid()}-{end}" for end in "ab"]
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    enter = [["ip", "netns", "exec", end, "bash", "-c", script, str(folder / "names")] for end in ends]
    try:
        for end in ends:
            _do("ip", "netns", "add", end)
            _do("ip", "-n", end, "link", "set", "lo", "up")
        _do("ip", "-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for end, address in zip(ends, ADDRESSES, strict=True):
            _do("ip", "-n", end, "addr", "add", f"{address}/24", "dev", DEVICE)
            _do("ip", "-n", end, "link", "set", DEVICE, "up")
            shape = ["tbf", "rate", f"{round(8e6 * mb_s)}bit", "burst", BURST, "limit", QUEUE]
            _do("tc", "-n", end, "qdisc", "add", "dev", DEVICE, "root", *shape)
        _do(*enter[0], "true")
        yield enter[0], enter[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"`{' '.join(command)}` failed: {done.stderr.strip()[:300]}; it needs root and iproute2")


# ---- its ends -------------------------------------------------------------------------------------------


def passes(job: argparse.Namespace) -> Iterator[tuple[str, WeightBus]]:
    """(compression, settings) of each pass; every second version travels whole."""
    for number, compression in enumerate(["none", "zstd"] if job.zstd else ["none"]):
        bus: dict[str, Any] = {"compression": compression, "bucket_bytes": 8 << 20, "port": FIRST_PORT + number}
        yield compression, WeightBus(delta=True, full_every=2, deadline_s=120.0, collective_timeout_s=30.0, **bus)


def publish(job: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All passes. Raises CaseFailed when no subscriber joins, or a version is not served."""
    settings = {"before": STEPS_BEFORE, "count": KEPT, "lr": job.lr, "device": torch.device("cpu"), "seed": job.seed}
    made = model.versions(folder / "model", **settings)
    found: dict[str, list[dict[str, float]]] = {}
    for compression, config in passes(job):
        # both namespaces are this job's own, so nothing is encrypted
        with Publisher(config, host=ADDRESSES[0], run_id=RUN, incarnation=1, insecure=True) as publisher:
            if not until(publisher.members, JOIN_S, 0.01):
                raise CaseFailed(f"no subscriber joined within {JOIN_S:.0f} s")
            rows = found[compression] = []
            for number in range(job.versions):
                rows.append(_published(publisher, number, made[to_and_fro(number, KEPT)]))
                time.sleep(BETWEEN_S)
    return {"passes": found, "density": model.density(made[0], made[1])}


def _published(publisher: Publisher, number: int, version: model.Version) -> dict[str, float]:
    names = list(version)
    digests = dict(zip(names, slice_digests(Part(version[name]) for name in names), strict=True))
    used = time.process_time()
    report = publisher.publish(number, version.items(), digests)
    if report.served != [NAME]:
        raise CaseFailed(f"v{number} is not served: {report.failed}")
    return row_of(report, time.process_time() - used)


class Engine:
    """Live weights without a sampler; they are digested where they lie."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}

    def load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        """See `weight_bus.intake.Load`."""
        for name, tensor in named_tensors:
            if name in self._live:
                self._live[name].copy_(tensor)
            else:
                self._live[name] = tensor.clone()
        return dict(zip(self._live, slice_digests(Part(tensor) for tensor in self._live.values()), strict=True))

    def activate(self, version: int, evaluate: bool) -> None:
        """Does nothing: there is no sampler."""

    def quarantine(self, version: int, reason: str) -> None:
        """Raises RuntimeError: nothing may go wrong here."""
        raise RuntimeError(f"v{version}: {reason}")


def subscribe(job: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """All passes, each until the publisher says goodbye."""
    cpu_s: dict[str, float] = {}
    for compression, config in passes(job):
        address, engine = f"tcp://{ADDRESSES[0]}:{config.port}", Engine()
        used = time.process_time()
        with Subscriber(address, name=NAME, config=config, host=ADDRESSES[1], run_id=RUN) as subscriber:
            try:
                while True:
                    subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
            except BusClosed:
                cpu_s[compression] = time.process_time() - used
    return {"cpu_s": cpu_s, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}


def main() -> int:
    """Entry point of either end: `python -m scripts.bench.link publisher|subscriber FOLDER PARENT`."""
    role, folder, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    set_up_logging(role, None)
    job = argparse.Namespace(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    torch.set_num_threads(job.threads)
    found = (publish if role == "publisher" else subscribe)(job, folder)
    (folder / f"{role}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


# ---- the command ----------------------------------------------------------------------------------------


def measure(job: argparse.Namespace) -> dict[str, Any]:
    """The whole job.

    Raises:
        CaseFailed: an end failed, or too little was measured.
        NoLink: this machine cannot make the link.
    """
    if job.zstd and importlib.util.find_spec("zstandard") is None:
        raise CaseFailed("--zstd needs the package zstandard: pip install 'slipstream-rl[zstd]'")
    with tempfile.TemporaryDirectory(prefix="bench-link-") as name:
        folder = Path(name)
        with cable(job.link_mb_s, folder) as ends, Processes(folder) as processes:
            (folder / "model").mkdir()
            model.write_weights(folder / "model", job.model, job.seed)
            (folder / "job.json").write_text(json.dumps(vars(job)), encoding="utf-8")
            for role, enter in zip(ROLES, ends, strict=True):
                words = [sys.executable, "-m", "scripts.bench.link", role, name, str(os.getpid())]
                # both ends are on one machine: threads that wait must not take cores from those that work
                processes.start(role, [*enter, *words], OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="")
            processes.wait_until("both ends to end", processes.ended, limit_s(job, folder), may_end=True)
        published, received = (json.loads((folder / f"{role}.json").read_text(encoding="utf-8")) for role in ROLES)
    return result_of(job, published, received)


def result_of(job: argparse.Namespace, published: Row, received: Row) -> dict[str, Any]:
    """The last line, from what the ends have written. Raises CaseFailed when too little was measured."""
    found = {compression: summary(rows) for compression, rows in published["passes"].items()}
    plain = found["none"]
    return {
        "link_mb_s": job.link_mb_s,
        "measured_mb_s": plain["full_bytes"] / plain["full_phases"]["wire_s"] / 1e6,
        "model": job.model,
        **plain,
        "density": published["density"],
        "lr": job.lr,
        "step": STEPS_BEFORE,
        "subscriber_cpu_s": received["cpu_s"]["none"] / job.versions,
        "digests_equal": True,
        "threads": job.threads,
        "cores": os.cpu_count(),
        "zstd": found.get("zstd"),
        "in_order": plain["delta_over_full"] <= job.at_most,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both kinds. Raises CaseFailed."""
    whole, changes = by_kind(rows, ENOUGH)
    full, smaller = whole[0]["bytes"], statistics.median(row["bytes"] for row in changes)
    sync, delta_sync = median_of(whole, "total_s"), median_of(changes, "total_s")
    return {
        "full_bytes": int(full),
        "delta_bytes": int(smaller),
        "delta_ratio": full / smaller,
        "full_sync_s": sync,
        "delta_sync_s": delta_sync,
        "delta_over_full": delta_sync / sync,
        "full_cpu_s": median_of(whole, "cpu_s"),
        "delta_cpu_s": median_of(changes, "cpu_s"),
        "full_phases": {key: round(seconds, 4) for key, seconds in phases(whole).items()},
        "delta_phases": {key: round(seconds, 4) for key, seconds in phases(changes).items()},
        "measured": [len(whole), len(changes)],
    }


def limit_s(job: argparse.Namespace, folder: Path) -> float:
    """More than both ends can need, unless they hang: each version ten times, whole, over the link."""
    num_bytes = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    each = JOIN_S + job.versions * (10 * num_bytes / (1e6 * job.link_mb_s) + 5)
    return MAKE_S + (1 + job.zstd) * each


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench link", description=__doc__)
    parser.add_argument("--link-mb-s", type=float, default=100.0, help="10^6 bytes a second (default: %(default)s)")
    parser.add_argument("--versions", type=int, default=14, help="to publish (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--model", choices=["tiny", "85M"], default="85M", help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the AdamW steps (default: %(default)s)")
    half = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--threads", type=int, default=half, help="of each end; default: half the cores")
    parser.add_argument("--zstd", action="store_true", help="once more with weight_bus.compression zstd")
    parser.add_argument("--at-most", type=float, default=0.3, help="share of the full update's time (default: 0.3)")
    return parser.parse_args(argv)


def command(argv: Sequence[str]) -> int:
    """Command line."""
    job = parse(argv)
    end_on_sigterm()  # the namespaces go away on the way out
    try:
        result = measure(job)
    except (NoLink, CaseFailed) as error:
        sys.stderr.write(f"bench link: {error}\n{getattr(error, 'logs', '')}\n")
        return 2
    return conclude(result, (), in_order=result["in_order"])


if __name__ == "__main__":
    sys.exit(main())
