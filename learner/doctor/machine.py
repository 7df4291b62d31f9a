"""One place by itself: shared memory, limits, GPUs and their links, kernels, ports. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from configs import auto
from configs.schema import Config
from learner.doctor.findings import Finding
from learner.policy.memory import GIB, Sizes

if TYPE_CHECKING:
    from learner.doctor.places import Place

OPEN_FILES = 1024
BUSY_MIB = 1024
"""Memory of a GPU that drivers and desktops take is less."""
FAR = ("SYS", "NODE", "PHB")
"""Of nvidia-smi's matrix: the path leaves the PCIe switch."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def on_gpus(config: Config) -> bool:
    """Whether the run is one of GPUs; device `auto` asks this machine."""
    return auto.on_gpus(config.placement.model_dump())


def staged_bytes(config: Config, sizes: Sizes | None) -> int:
    """Of an engine's update in /dev/shm: what a server has in host memory for SGLang's processes to map."""
    bus, lora = config.weight_bus, config.learner.lora
    on_devices = bus.backend == "nccl" and bus.transport == "collective"  # handed over by CUDA IPC handles
    in_files = config.rollout.engine == "sglang" and bus.stage_in == "server"
    if sizes is None or on_devices or not in_files:
        return 0
    carried = sizes.adapter_parameters(lora) if lora.rank else sizes.parameters
    return carried * DTYPE_BYTES[config.rollout.dtype]


def shared_memory(config: Config, sizes: Sizes | None, free: int | None, engines: int, node: str) -> Finding:
    """What the engines of a machine take of /dev/shm: staged updates, and what NCCL and torch share."""
    if free is None:
        what = "there is no /dev/shm"
        return Finding("warn", "shared memory", what, mend="mount a tmpfs there (docker run --shm-size)", node=node)
    needs = staged = staged_bytes(config, sizes) * engines
    if on_gpus(config):
        needs += GIB // 4 * engines  # NCCL and torch between processes of one machine
    said = f"/dev/shm has {free / GIB:.1f} GiB free"
    if needs <= free:
        return Finding("ok", "shared memory", f"{said}, {needs / GIB:.1f} GiB are needed", node=node)
    return Finding(
        "stop" if needs > 2 * free else "warn",
        "shared memory",
        f"{said}, and {engines} engine(s) take up to {needs / GIB:.1f} GiB there",
        why=f"{'the first update of the weights' if staged else 'NCCL'} fails with `No space left on device`",
        mend="docker run --shm-size, or mount -o remount,size=..., or free what old processes left there",
        node=node,
    )


def limits(its: Mapping[str, int], node: str) -> Iterable[Finding]:
    """Of processes."""
    files = its["open files"]
    if 0 <= files < OPEN_FILES:
        yield Finding(
            "warn",
            "limits",
            f"{files} open files are allowed",
            why="sockets, rewards and environments of one server may take more",
            mend=f"ulimit -n {OPEN_FILES * 64}",
            node=node,
        )
    else:
        yield Finding("ok", "limits", f"{files if files >= 0 else 'any number of'} open files", node=node)


def ports(problems: Mapping[str, str], place: "Place") -> Iterable[Finding]:
    """Fixed ports that are taken."""
    for key, problem in problems.items():
        yield Finding(
            "stop",
            "port",
            f"{key}: {place.ports[key]} on {place.config.network.host} cannot be bound: {problem}",
            mend=f"end that process, or --set {key}=another port",
            node=str(place),
        )
    fixed = {key: port for key, port in place.ports.items() if port}
    if not problems:
        shown = ", ".join(f"{key} {port}" for key, port in fixed.items()) or "only free ones are asked for"
        yield Finding("ok", "port", shown, node=str(place))


# ---- GPUs -------------------------------------------------------------------------------------------------


def devices(config: Config, facts: Mapping[str, Any], wanted: int, node: str) -> Iterable[Finding]:
    """GPUs that are there, free and alike; how they reach each other and other machines."""
    gpus = facts["gpus"]
    if not on_gpus(config):
        yield Finding("ok", "GPU", "none is asked for (placement.device cpu)", node=node)
        return
    if len(gpus) < wanted:
        yield Finding(
            "stop",
            "GPU",
            f"{wanted} GPU(s) are placed here, nvidia-smi shows {len(gpus)}",
            mend="correct placement, or the driver and the container's --gpus",
            node=node,
        )
    busy = [gpu for gpu in gpus if gpu["memory.used"].isdigit() and int(gpu["memory.used"]) > BUSY_MIB]
    for gpu in busy:
        yield Finding(
            "warn",
            "GPU",
            f"GPU {gpu['index']} has {int(gpu['memory.used']) / 1024:.1f} GiB in use before anything starts",
            why="the memory budget counts on an empty GPU",
            mend="nvidia-smi shows the processes; end them, or take another GPU",
            node=node,
        )
    names = Counter(gpu["name"] for gpu in gpus)
    if len(names) > 1:
        what, mend = f"several kinds: {dict(names)}", "give each side GPUs of one kind (placement)"
        yield Finding("warn", "GPU", what, why="the slowest sets the pace of a side", mend=mend, node=node)
    if gpus and not busy and len(names) == 1:
        yield Finding("ok", "GPU", f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory.total']} MiB", node=node)
    yield from _links(facts, node)
    yield _infiniband(config, facts["infiniband"], node)


def _links(facts: Mapping[str, Any], node: str) -> Iterable[Finding]:
    links, peer = facts["links"], facts["peer_access"]
    if not links:
        return
    far = sorted(pair for pair, how in links.items() if how in FAR)
    blocked = sorted(pair for pair, how in peer.items() if how not in ("OK", "X"))
    if blocked:
        yield Finding(
            "warn",
            "P2P",
            f"no peer access between {', '.join(blocked[:4])}{' and more' if len(blocked) > 4 else ''}",
            why="NCCL goes through host memory, and has hung where a driver claims peer access that it lacks",
            mend="--set 'network.env={NCCL_P2P_DISABLE: \"1\"}' if a broadcast hangs",
            node=node,
        )
    if far:
        what = f"no NVLink between {', '.join(far[:4])}{' and more' if len(far) > 4 else ''} ({links[far[0]]})"
        mend = "give learner ranks that share weights GPUs with NVLink between them (nvidia-smi topo -m)"
        yield Finding("warn", "NVLink", what, why="gathers of the weights go over PCIe", mend=mend, node=node)
    elif not blocked:
        kinds = ", ".join(f"{count} x {how}" for how, count in Counter(links.values()).items())
        yield Finding("ok", "NVLink", f"pairs of GPUs: {kinds}", node=node)


def _infiniband(config: Config, found: Mapping[str, str], node: str) -> Finding:
    down = [name for name, said in found.items() if not said.startswith("ACTIVE")]
    if found and down and len(down) < len(found):
        mend = "ibstat shows why; or leave them out: --set 'network.env={NCCL_IB_HCA: ...}'"
        return Finding("warn", "InfiniBand", f"not active: {', '.join(down)}", mend=mend, node=node)
    if len(found) > len(down):
        up = [f"{name} {said}" for name, said in found.items()]
        return Finding("ok", "InfiniBand", "; ".join(up[:2]) + (f"; {len(up)} ports" if len(up) > 2 else ""), node=node)
    if len(config.shares) > 1:
        what, mend = "no active port: weights travel over TCP", "expected without such a network; else ibstat"
        return Finding("warn", "InfiniBand", what, mend=mend, node=node)
    return Finding("ok", "InfiniBand", "none, and one machine needs none", node=node)


# ---- kernels ----------------------------------------------------------------------------------------------


def needed_kernels(config: Config, role: str) -> list[str]:
    """Modules with kernels of a role that it imports when the first answer or step asks for them."""
    if not on_gpus(config):
        return []  # SGLang takes stand-ins there, and the learner compiles nothing
    if role == "rollout":
        return ["sgl_kernel", "triton"] if config.rollout.engine == "sglang" else []
    return ["triton"] if config.learner.compile else []


def kernels(imported: Mapping[str, str], compiler: str | None, node: str) -> Iterable[Finding]:
    """Those that cannot be imported."""
    broken = {name: why for name, why in imported.items() if why}
    for name, why in broken.items():
        if name == "sgl_kernel":
            mend = "bash scripts/install.sh --venv .venv sglang (a wheel of this CUDA), or --set rollout.engine=torch"
        else:
            mend = "pip install the triton that torch pins, or --set learner.compile=false"
        yield Finding(
            "stop",
            "kernel",
            f"{name} cannot be imported: {why}",
            why="it is loaded by the first request or step, minutes after the start",
            mend=mend,
            node=node,
        )
    if "triton" in imported and compiler is None:
        mend = "install gcc, or set CC; or --set learner.compile=false"
        yield Finding("stop", "kernel", "triton finds no C compiler (cc, gcc, CC)", mend=mend, node=node)
    elif imported and not broken:
        yield Finding("ok", "kernel", f"{', '.join(imported)} load", node=node)


def engines_on(config: Config, node: str) -> int:
    """Rollout servers of a node."""
    shares = [share for share in config.shares if share.node == node]
    return sum(len(share.engines(config.placement.tensor_parallel)) for share in shares)
