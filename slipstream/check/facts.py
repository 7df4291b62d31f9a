"""Facts of one role on one machine, as plain data: packages, environment, limits, memory, GPUs. Imports no torch.

They are read in the interpreter and the environment that the role's processes get, and compared elsewhere.
"""

import csv
import hashlib
import importlib
import io
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.machine import nvidia_smi
from replay.channel import KeysError, load_keys
from slipstream.runtime.fingerprint import FingerprintError, model_fingerprint

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner")
SHOWN = ("torch", "nccl", "transformers", "tokenizers", "safetensors", "pyzmq", "msgpack", "numpy", "sglang", "triton")
"""Distributions whose versions are shown side by side; `nccl` is that of the CUDA build of torch."""
KERNELS = ("sgl_kernel", "triton")
PINNED_BY_SGLANG = ("torch", "transformers")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "UCX_", "UCC_", "CUDA_", "GLOO_", "SGLANG_")
SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
GPU_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")


def of_role(model: str, chat_template: str | None, keys: str | None) -> dict[str, Any]:
    """Everything that costs next to nothing to read."""
    return {
        "host": socket.gethostname(),
        "executable": sys.executable,
        "python": platform.python_version(),
        "versions": versions(),
        "pins": broken_pins(),
        "code": digest_of_code(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        "open_files": open_files(),
        "shared_memory": shared_memory(),
        "model": fingerprint(model, chat_template),
        "keys": keys_of(keys),
        "compiler": compiler(),
    }


def shared_memory() -> int | None:
    """Free bytes of /dev/shm; None without it."""
    if not SHARED_MEMORY.is_dir():
        return None
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def open_files() -> int:
    """How many this process may have; -1 is no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def versions() -> dict[str, str]:
    """Of SHOWN, those that are installed."""
    found: dict[str, str] = {}
    for name in SHOWN:
        names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if name == "nccl" else (name,)
        for distribution in names:
            try:
                found.setdefault(name, metadata.version(distribution))
            except metadata.PackageNotFoundError:
                continue
    return found


def broken_pins() -> list[str]:
    """`slipstream-rl[mcp] wants mcp>=2.3, 2.0 is installed`: pins of ours, and of SGLang on what it is built for."""
    from packaging.requirements import InvalidRequirement, Requirement

    broken: list[tuple[str, str]] = []
    absent = set()
    for owner in ("slipstream-rl", "sglang"):
        for text in _pins_of(owner):
            found = re.search(r"extra == ['\"]([^'\"]+)", text) if owner == "slipstream-rl" else None
            extra = found[1] if found else ""
            try:
                wanted = Requirement(text)
                if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                    continue
                there = metadata.version(wanted.name)
            except InvalidRequirement:
                continue
            except metadata.PackageNotFoundError:  # found by what needs it
                absent.add(extra)
                continue
            if owner == "sglang" and wanted.name not in PINNED_BY_SGLANG:
                continue
            if not wanted.specifier.contains(there, prereleases=True):
                of = f"{owner}[{extra}]" if extra else owner
                broken.append((extra, f"{of} wants {wanted.name}{wanted.specifier}, {there} is installed"))
    return [line for extra, line in broken if not extra or extra not in absent]  # an extra is in use where it is whole


def _pins_of(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def digest_of_code() -> str:
    """Of all modules of the five packages, so that two releases or clones are told apart."""
    digest = hashlib.blake2b(digest_size=6)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def fingerprint(model: str, chat_template: str | None) -> dict[str, str]:
    """Of the model folder as this role sees it, or `error`."""
    try:
        return model_fingerprint(model, chat_template)
    except FingerprintError as error:
        return {"error": str(error)}


def keys_of(folder: str | None) -> dict[str, Any] | None:
    """Public halves of the keys of network.keys, or `error`; None without."""
    try:
        keys = load_keys(folder)
    except KeysError as error:
        return {"error": str(error)}
    if keys is None:
        return None
    return {
        "server": keys.server_public.decode(),
        "client": keys.client_public.decode(),
        "name": keys.name,
        "admits": sorted(public.decode() for public in keys.clients),
    }


def compiler() -> str | None:
    """What triton compiles its launchers with."""
    names = filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"])
    return next(filter(None, map(shutil.which, names)), None)


# ---- devices ----------------------------------------------------------------------------------------------


def of_devices() -> dict[str, Any]:
    """GPUs and InfiniBand ports of this machine."""
    query = nvidia_smi(f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    rows = csv.reader(io.StringIO(query or ""), skipinitialspace=True)
    return {
        "gpus": [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)],
        "infiniband": infiniband(INFINIBAND),
    }


def infiniband(folder: Path) -> dict[str, str]:
    """`mlx5_0:1` to its state, layer and rate. Example: {"mlx5_0:1": "ACTIVE InfiniBand 400 Gb/sec (4X NDR)"}"""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        texts = {}
        for name in ("state", "link_layer", "rate"):
            try:
                texts[name] = (port / name).read_text(encoding="ascii").strip()
            except OSError:
                texts[name] = "unreadable"
        state = texts["state"].rpartition(": ")[2]
        found[f"{port.parents[1].name}:{port.name}"] = f"{state} {texts['link_layer']} {texts['rate']}"
    return found


def kernels(modules: Iterable[str]) -> dict[str, str]:
    """By module of KERNELS why it cannot be imported here; empty for one that can."""
    found = {}
    for name in [name for name in modules if name in KERNELS]:
        try:
            importlib.import_module(name)
            found[name] = ""
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # of packages built for another torch
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found
