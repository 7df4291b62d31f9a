"""SGLang on a machine without a GPU: what must be in place before `import sglang`.

SGLang imports triton, torchvision and sgl_kernel at module scope, on a CPU too, where it calls nothing of them. Where
one is missing, or is a CUDA build that cannot be imported beside a CPU torch, a stand-in takes its place, which a clone
has in scripts/sglang_cpu/ and an installed package does not. Each has a
folder of its own, so that a package that works is never hidden. The folders go on `sys.path`, which the processes that
SGLang spawns inherit; PYTHONPATH stays as it is, so reward processes never see a stand-in.
"""

import importlib
import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path

import torch

from rollout_server.engines.base import EngineError

STOOD_IN_FOR = ("sgl_kernel", "torchvision", "triton")
CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"
CANNOT_BE_IMPORTED = (ImportError, OSError, RuntimeError, AttributeError)
"""What packages that were built for another torch have been seen to raise."""


def stand_in_folder(package: str) -> Path:
    """The path entry that holds the stand-in of one package and nothing else."""
    return Path(__file__).parents[3] / "scripts" / "sglang_cpu" / f"without_{package}"


def prepare_cpu() -> tuple[str, ...]:
    """Make SGLang importable here and in its children, once. Returns what stand-ins stand for.

    Raises EngineError where torch is no CPU build, SGLang is not installed, or SGLang or transformers were imported
    before the first call: at their import they look for a GPU and for torchvision.
    """
    accelerator = torch.version.cuda or torch.version.hip
    if accelerator is not None:
        raise EngineError(
            f"SGLang on a CPU needs a CPU build of torch, and torch {torch.__version__} is built for {accelerator}; "
            "take placement.device: cuda with the extra `sglang`, or rollout.engine: torch"
        )
    if importlib.util.find_spec("sglang") is None:
        raise EngineError(
            "rollout.engine: sglang, and SGLang is not installed; on a machine without a GPU: "
            "bash scripts/install.sh --venv .venv sglang-cpu"
        )
    folders = {package: str(stand_in_folder(package)) for package in STOOD_IN_FOR}
    new = [package for package in STOOD_IN_FOR if folders[package] not in sys.path and not _works(package)]
    if lacking := [package for package in new if not Path(folders[package]).is_dir()]:
        raise EngineError(
            f"SGLang on a CPU needs stand-ins for {', '.join(lacking)}, which a clone of this repository has in"
            f" scripts/sglang_cpu; run from one (no {folders[lacking[0]]}), or take rollout.engine: torch"
        )
    prepared = {"sglang": not new and os.environ.get(CPU_SWITCH) == "1", "transformers": "torchvision" not in new}
    for module, before in prepared.items():
        if module in sys.modules and not before:
            raise EngineError(f"{module} was imported before prepare_cpu() and has already looked for what is there")
    os.environ[CPU_SWITCH] = "1"
    sys.path[:0] = [folders[package] for package in new]
    importlib.invalidate_caches()
    return tuple(package for package in STOOD_IN_FOR if folders[package] in sys.path)


def give_cores(ranks: int, threads: int) -> None:
    """Say which cores each scheduler of an engine takes, and how many threads."""
    # without it torch takes all cores there, and spins on those that others use
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if ranks > 1:  # SGLang alone refuses more ranks than NUMA nodes
        cores = sorted(os.sched_getaffinity(0))
        ends = [len(cores) * rank // ranks for rank in range(ranks + 1)]
        parts = (cores[first:end] or cores for first, end in pairwise(ends))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in parts))


def _works(package: str) -> bool:
    """Whether the package that is installed can be imported; a failed import leaves nothing behind."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without origin: some folder of that name, no package
        return False
    try:
        importlib.import_module(package)
    except CANNOT_BE_IMPORTED:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
        return False
    return True
