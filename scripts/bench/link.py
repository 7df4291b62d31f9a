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
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay.lifeline import die_with_parent
from scripts.bench import bus
from scripts.bench.core import CaseFailed, Row, say
from scripts.chaos.report import conclude, end_on_sigterm

ADDRESSES = ("10.213.7.1", "10.213.7.2")
DEVICE = "net0"
BURST = "512kb"  # above 256 KiB: what TCP hands down in one piece (TSO, GSO) must fit into it, or nothing passes
QUEUE = "8mb"
ENOUGH = 5  # versions of each kind, without the first, that a median needs


@contextmanager
def cable(mb_s: float, folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """For each end, the words that run a command there; `mb_s` are 10^6 bytes a second in each direction.

    A file of host names goes into the folder. Raises CaseFailed, which says what this machine has not.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise CaseFailed(f"no `{command}` command; install iproute2")
    # torch asks for the names of addresses, and there is no name server in here
    lines = ["127.0.0.1 localhost", *(f"{address} end{n}" for n, address in enumerate(ADDRESSES))]
    (folder / "names").write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = ends = [f"slip{os.getpid()}-{end}" for end in "ab"]
    script = f'mount --bind "{folder}/names" /etc/hosts && exec "$0" "$@"'
    enter = [["ip", "netns", "exec", end, "bash", "-c", script] for end in ends]
    try:
        for end in ends:
            _do(f"ip netns add {end}")
            _do(f"ip -n {end} link set lo up")
        _do(f"ip -n {first} link add {DEVICE} type veth peer name {DEVICE} netns {second}")
        for end, address in zip(ends, ADDRESSES, strict=True):
            _do(f"ip -n {end} addr add {address}/24 dev {DEVICE}")
            _do(f"ip -n {end} link set {DEVICE} up")
            _do(f"tc -n {end} qdisc add dev {DEVICE} root tbf rate {round(8e6 * mb_s)}bit burst {BURST} limit {QUEUE}")
        _do("true", enter[0])
        yield enter[0], enter[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True, check=False)


def _do(command: str, enter: Sequence[str] = ()) -> None:
    done = subprocess.run([*enter, *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CaseFailed(f"`{command}` failed: {done.stderr.strip()[:300]}; it needs root and iproute2")


def measure(job: argparse.Namespace) -> dict[str, bus.Updates]:
    """By compression, a pass from this end of the link to the other; every second version travels whole."""
    words = ["--device=cpu", f"--shape={job.model}", "--receivers=1", "--requests=0", "--bucket-mib=8"]
    words += [f"--{name}={getattr(job, name)}" for name in ("seed", "lr", "versions")]
    # both namespaces are this job's own, so nothing is encrypted
    words += [f"--work={job.folder}", f"--set=network.host={ADDRESSES[1]}", "--set=network.insecure=true"]
    passes = {}
    for compression in ("none", "zstd") if job.zstd else ("none",):
        folder = Path(job.folder) / compression
        folder.mkdir()
        args = bus.parse([*words, f"--set=weight_bus.compression={compression}"])
        passes[compression] = bus.updates(args, folder, ADDRESSES[0], job.far_end, job.threads)
    return passes


def result_of(job: argparse.Namespace, passes: Mapping[str, bus.Updates]) -> dict[str, Any]:
    """The last line, from what each pass has found. Raises CaseFailed when too little was measured."""
    found = {compression: summary(its.rows) for compression, its in passes.items()}
    plain, pauses = found["none"], passes["none"].pauses
    return {
        "link_mb_s": job.link_mb_s,
        "measured_mb_s": plain["full_bytes"] / plain["full_phases"]["wire_s"] / 1e6,
        "model": job.model,
        **plain,
        "density": passes["none"].density,
        "lr": job.lr,
        "step": bus.STEPS_BEFORE,
        "subscriber_cpu_s": (pauses[-1]["cpu_s"] - pauses[0]["cpu_s"]) / (job.versions - 1),
        "digests_equal": True,
        "threads": job.threads,
        "cores": os.cpu_count(),
        "zstd": found.get("zstd"),
        "in_order": plain["delta_over_full"] <= job.at_most,
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of both kinds, without the digests of a learner. Raises CaseFailed."""
    kept = [{key: row[key] for key in row if key != "learner_digest_s"} for row in rows]
    return bus.summary(*bus.by_kind(kept, ENOUGH))


def main() -> int:
    """Entry point of the publisher's end: `python -m scripts.bench.link JOB`."""
    job = argparse.Namespace(**json.loads(sys.argv[1]))
    die_with_parent(job.parent)
    try:
        result = result_of(job, measure(job))
    except CaseFailed as error:
        say(str(error))
        return 2
    return conclude(result, (), in_order=result["in_order"])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench link", description=__doc__)
    half = max(1, (os.cpu_count() or 1) // 2)
    for name, default, text in (
        ("link-mb-s", 100.0, "10^6 bytes a second"),
        ("versions", 14, "to publish"),
        ("seed", 1, "of weights and gradients"),
        ("lr", 1e-6, "of the AdamW steps"),
        ("threads", half, "of each end"),
        ("at-most", 0.3, "share of the full update's time"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    parser.add_argument("--model", choices=["tiny", "85M"], default="85M", help="default: %(default)s")
    parser.add_argument("--zstd", action="store_true", help="once more with weight_bus.compression zstd")
    job = parser.parse_args(argv)
    if job.zstd and importlib.util.find_spec("zstandard") is None:
        parser.error("--zstd needs the package zstandard: pip install 'slipstream-rl[zstd]'")
    return job


def command(argv: Sequence[str]) -> int:
    """2 when there is no result."""
    job = parse(argv)
    end_on_sigterm()  # the namespaces go away on the way out
    # both ends are on one machine: threads that wait must not take cores from those that work
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bench-link-") as job.folder,
            cable(job.link_mb_s, Path(job.folder)) as (here, job.far_end),
        ):
            words = [sys.executable, "-m", "scripts.bench.link", json.dumps(vars(job) | {"parent": os.getpid()})]
            return subprocess.run([*here, *words], env=environment, check=False).returncode
    except CaseFailed as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
