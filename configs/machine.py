"""What this machine has: its GPUs, whether the installed torch can use them, and what both need. Imports no torch."""

import importlib.util
import itertools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

NVIDIA_SMI_S = 20.0
NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang sets both to 0 in its processes; another value at the other end fails the first broadcast."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""Of learner ranks with learner.deterministic; read by libraries when they are loaded or first used."""

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of x86 and, the last one, of Arm."""


def has_usable_gpu(environment: Mapping[str, str]) -> bool:
    """Whether processes of this machine would find a GPU."""
    return visible_devices(environment) != () and torch_has_cuda() and count_gpus() > 0


def count_gpus() -> int:
    """GPUs of this machine by what the driver shows, whatever CUDA_VISIBLE_DEVICES says."""
    if (shown := nvidia_smi("-L")) is not None:  # knows what a container or a scheduler has left of the machine
        return len(re.findall(r"^GPU \d+:", shown, re.MULTILINE))
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def gpu_bytes() -> int | None:
    """Memory of this machine's smallest GPU; None without one, or where the driver does not say."""
    shown = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    mib = [int(line) for line in (shown or "").split() if line.isdigit()]
    return min(mib) * 2**20 if mib else None


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether this processor has products of bfloat16; None where the system does not say, as on macOS."""
    if not cpuinfo.is_file():
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else not BFLOAT16_FLAGS.isdisjoint(found[1].split())


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, read from its version file; True when that is not there."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    version = Path(spec.origin).parent / "version.py"
    if not version.is_file():
        return True
    return re.search(r"^cuda\b[^=]*=\s*['\"]\d", version.read_text(encoding="utf-8"), re.MULTILINE) is not None


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES (numbers or UUIDs) up to the first invalid one; None when it is not set."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    parts = (part.strip() for part in value.split(","))
    return tuple(itertools.takewhile(lambda part: part and not part.startswith("-") and part != "NoDevFiles", parts))


def nvidia_smi(*words: str) -> str | None:
    """What it says of all devices; None where there is none, or it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    try:
        shown = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown.stdout if shown.returncode == 0 else None
