"""Checks of one machine: disk, shared memory, limits, ports, kernels, GPUs and their links. Facts come as arguments."""

import os
import resource
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from configs import auto
from configs.schema import Config
from learner.advantages import facts_of
from learner.policy.memory import GIB
from slipstream.check.finding import Finding, ok, stop, warn
from slipstream.families.sizes import Sizes

OPEN_FILES = 1024
FREE_INODES = 10_000
JOURNAL_BYTES = GIB // 16
"""Replay's journal stays small beside a checkpoint; logs and metrics as well."""
STATE_BYTES = 12
"""A parameter in dcp/: weight and two moments in float32."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
BUSY_MIB = 1024
"""Memory of a GPU that drivers and desktops take is less."""
ROOM = "free some, or name a folder with room (run.dir)"


def on_gpus(config: Config) -> bool:
    """Whether the run is one of GPUs; device `auto` asks this machine."""
    return auto.on_gpus(config.placement.model_dump())


# ---- disk -------------------------------------------------------------------------------------------------


def checkpoint_bytes(config: Config, sizes: Sizes) -> int:
    """Of one checkpoint: dcp/ of what is trained, hf/ of the whole policy; a critic is taken to be of its size.

    It has adapters where the policy has them.
    """
    lora = config.learner.lora
    trained = sizes.adapter_parameters(lora) if lora.rank else sizes.parameters
    trained *= 2 if facts_of(config.algorithm).needs_critic else 1
    return trained * STATE_BYTES + weights_bytes(config, sizes)


def weights_bytes(config: Config, sizes: Sizes) -> int:
    """Of hf/, all that checkpoint.keep_best keeps: with LoRA the adapters are merged there."""
    return sizes.parameters * DTYPE_BYTES[config.checkpoint.hf_dtype]


def disk(config: Config, sizes: Sizes | None) -> Finding:
    """Free bytes and inodes of the disk of run.dir, and what this process may write into one file."""
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    there, kept, best = os.statvfs(folder), config.checkpoint.keep + 1, config.checkpoint.keep_best
    free = there.f_bavail * there.f_frsize
    one, best_bytes = (checkpoint_bytes(config, sizes), best * weights_bytes(config, sizes)) if sizes else (0, 0)
    whole = kept * one + JOURNAL_BYTES + best_bytes  # the next checkpoint comes before the oldest goes
    said = f"{free / GIB:.1f} GiB free in {folder}"
    limit, mib = resource.getrlimit(resource.RLIMIT_FSIZE)[0], 1 << 20
    largest = max(one // max(1, config.num_learner_ranks), JOURNAL_BYTES)
    if limit != resource.RLIM_INFINITY and limit < largest:
        what = f"a file may have {limit / mib:.0f} MiB (ulimit -f), and the run writes some of {largest / mib:.0f} MiB"
        return stop("disk", what, why="a larger file ends its process by SIGXFSZ", mend="ulimit -f unlimited")
    if free < one + JOURNAL_BYTES:
        what = f"{said}; one checkpoint and the journal take {(one + JOURNAL_BYTES) / GIB:.1f} GiB"
        return stop("disk", what, why="the run would end at its first checkpoint", mend=ROOM)
    if free < whole:
        what = f"{said}; {kept} checkpoints at a time (checkpoint.keep {config.checkpoint.keep}"
        what += f"{f', and {best} of keep_best' if best else ''}) take {whole / GIB:.1f} GiB"
        return warn("disk", what, why="the run would end at a later checkpoint", mend=ROOM)
    if there.f_files > 0 and there.f_favail < FREE_INODES:
        return warn("disk", f"{there.f_favail} inodes are free in {folder}", mend=ROOM)
    return ok("disk", f"{said}, {whole / GIB:.1f} GiB are needed at a time")


def journal_disk(config: Config) -> Finding:
    """Free bytes of the disk of replay.journal_dir, against what the journal may grow to."""
    folder, key, most = str(config.replay.journal_dir), "replay.journal_dir", config.replay.journal_max_bytes
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    said, mend = f"{free / GIB:.1f} GiB free in {folder}", f"free some, or name a folder with room ({key})"
    if free < JOURNAL_BYTES:
        return stop("journal", said, why="the run would soon wait for its journal's disk", mend=mend)
    if free < most and config.replay.journal_keep == "checkpoint":
        what = f"{said}; the journal may have {most / GIB:.1f} GiB before a checkpoint frees it"
        return warn("journal", what, mend=f"{mend}, or less replay.journal_max_bytes")
    return ok("journal", said)


# ---- shared memory, limits, ports -------------------------------------------------------------------------


def staged_bytes(config: Config, sizes: Sizes | None) -> int:
    """Of an engine's update in /dev/shm: what a server has in host memory for the engine's processes to map.

    What lies on GPUs is handed over by CUDA IPC handles.
    """
    bus, lora = config.weight_bus, config.learner.lora
    if sizes is None or bus.on_gpus or not config.rollout.facts.has_processes or bus.stage_in != "server":
        return 0
    carried = sizes.adapter_parameters(lora) if lora.rank else sizes.parameters
    return carried * DTYPE_BYTES[config.rollout.dtype]


def shared_memory(config: Config, sizes: Sizes | None, free: int | None, engines: int, node: str) -> Finding:
    """What the engines of a machine take of /dev/shm: staged updates, and what NCCL and torch share."""
    if free is None:
        mend = "mount a tmpfs there (docker run --shm-size)"
        return warn("shared-memory", "there is no /dev/shm", mend=mend, node=node)
    needs = staged = staged_bytes(config, sizes) * engines
    if on_gpus(config):
        needs += GIB // 4 * engines  # NCCL and torch between processes of one machine
    said = f"/dev/shm has {free / GIB:.1f} GiB free"
    if needs <= free:
        return ok("shared-memory", f"{said}, {needs / GIB:.1f} GiB are needed", node=node)
    return (stop if needs > 2 * free else warn)(
        "shared-memory",
        f"{said}, and {engines} engine(s) take up to {needs / GIB:.1f} GiB there",
        why=f"{'the first update of the weights' if staged else 'NCCL'} fails with `No space left on device`",
        mend="docker run --shm-size, or mount -o remount,size=..., or free what old processes left there",
        node=node,
    )


def host_memory(needs: int, said: str, total: int, available: int) -> Finding:
    """What the learner's ranks pin of a machine's memory."""
    if needs <= available:
        return ok("host-memory", f"{said}; {available / GIB:.1f} GiB are available")
    return (stop if needs > total else warn)(
        "host-memory",
        f"{said}, and {available / GIB:.1f} of {total / GIB:.1f} GiB are available",
        why="the first checkpoint copies weights and moments there, and the kernel would end a process",
        mend="give the learner more nodes (placement), train adapters (learner.lora.rank), or end what else runs here",
    )


def limits(files: int, node: str) -> Finding:
    """Open files of a process; -1 is no limit."""
    if not 0 <= files < OPEN_FILES:
        return ok("limits", f"{files if files >= 0 else 'any number of'} open files", node=node)
    why, mend = "sockets, rewards and environments of one server may take more", f"ulimit -n {OPEN_FILES * 64}"
    return warn("limits", f"{files} open files are allowed", why=why, mend=mend, node=node)


def problem_with_port(host: str, port: int) -> str:
    """Why the port cannot be bound, and by which process it is held; empty where it can be, and for port 0."""
    if port == 0:
        return ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"{error.strerror}{_holder(port)}"
    return ""


def _holder(port: int) -> str:
    """` by pid 71 (python -m replay.main)`; empty where it cannot be seen, as with a process of another user."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None:
            with suppress(psutil.Error):  # it has ended
                return f" by pid {one.pid} ({' '.join(psutil.Process(one.pid).cmdline())[:60]})"
    return ""


def ports(wanted: Mapping[str, int], problems: Mapping[str, str], node: str) -> Iterable[Finding]:
    """Fixed ports by key, and why they cannot be bound."""
    for key, problem in problems.items():
        mend = f"end that process, or --set {key}=another port"
        yield stop("port", f"{key}: {wanted[key]} cannot be bound: {problem}", mend=mend, node=node)
    if not problems:
        shown = ", ".join(f"{key} {port}" for key, port in wanted.items() if port) or "only free ones are asked for"
        yield ok("port", shown, node=node)


# ---- kernels ----------------------------------------------------------------------------------------------


def needed_kernels(config: Config, role: str) -> list[str]:
    """Modules with kernels of a role that it imports when the first answer or step asks for them."""
    if not on_gpus(config):
        return []  # SGLang takes stand-ins there, and the learner compiles nothing
    if role == "rollout":
        return list(config.rollout.facts.kernels)
    return ["triton"] if config.learner.compile else []


KERNEL_MENDS = {
    "sgl_kernel": "bash scripts/install.sh --venv .venv sglang (a wheel of this CUDA), or --set rollout.engine=torch",
    "triton": "pip install the triton that torch pins, or --set learner.compile=false",
}


def kernels(imported: Mapping[str, str], compiler: str | None, node: str) -> Iterable[Finding]:
    """Those that cannot be imported, by module with the reason."""
    broken = {name: why for name, why in imported.items() if why}
    for name, problem in broken.items():
        why = "it is loaded by the first request or step, minutes after the start"
        yield stop("kernel", f"{name} cannot be imported: {problem}", why=why, mend=KERNEL_MENDS[name], node=node)
    if "triton" in imported and compiler is None:
        mend = "install gcc, or set CC; or --set learner.compile=false"
        yield stop("kernel", "triton finds no C compiler (cc, gcc, CC)", mend=mend, node=node)
    elif imported and not broken:
        yield ok("kernel", f"{', '.join(imported)} load", node=node)


# ---- GPUs -------------------------------------------------------------------------------------------------


def devices(config: Config, facts: Mapping[str, Any], wanted: int, node: str) -> Iterable[Finding]:
    """GPUs that are there, free and alike, and InfiniBand."""
    gpus = facts["gpus"]
    if not on_gpus(config):
        yield ok("gpu", "none is asked for (placement.device cpu)", node=node)
        return
    if len(gpus) < wanted:
        what = f"{wanted} GPU(s) are placed here, nvidia-smi shows {len(gpus)}"
        yield stop("gpu", what, mend="correct placement, or the driver and the container's --gpus", node=node)
    busy = [gpu for gpu in gpus if gpu["memory.used"].isdigit() and int(gpu["memory.used"]) > BUSY_MIB]
    for gpu in busy:
        used = f"GPU {gpu['index']} has {int(gpu['memory.used']) / 1024:.1f} GiB in use before anything starts"
        mend = "nvidia-smi shows the processes; end them, or take another GPU"
        yield warn("gpu", used, why="the memory budget counts on an empty GPU", mend=mend, node=node)
    names = Counter(gpu["name"] for gpu in gpus)
    if len(names) > 1:
        what, mend = f"several kinds: {dict(names)}", "give each side GPUs of one kind (placement)"
        yield warn("gpu", what, why="the slowest sets the pace of a side", mend=mend, node=node)
    if gpus and not busy and len(names) == 1:
        yield ok("gpu", f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory.total']} MiB", node=node)
    yield from _infiniband(config, facts["infiniband"], node)


def _infiniband(config: Config, found: Mapping[str, str], node: str) -> Iterable[Finding]:
    up = [f"{name} {said}" for name, said in found.items() if said.startswith("ACTIVE")]
    down = [name for name, said in found.items() if not said.startswith("ACTIVE")]
    if up and down:
        mend = "ibstat shows why; or leave them out: --set 'network.env={NCCL_IB_HCA: ...}'"
        yield warn("infiniband", f"not active: {', '.join(down)}", mend=mend, node=node)
    elif up:
        yield ok("infiniband", "; ".join(up[:2]) + (f"; {len(up)} ports" if len(up) > 2 else ""), node=node)
    elif len(config.shares) > 1:
        mend = "expected without such a network; else ibstat"
        yield warn("infiniband", "no active port: weights travel over TCP", mend=mend, node=node)


def engines_on(config: Config, node: str) -> int:
    """Rollout servers of a node."""
    shares = [share for share in config.shares if share.node == node]
    return sum(len(share.engines(config.placement.tensor_parallel)) for share in shares)
