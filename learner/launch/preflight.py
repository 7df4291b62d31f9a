"""Checks of what the configuration names, before any process starts: files, tokenizer, data, reward, keys, port."""

import importlib.util
import json
import os
import socket
import struct
from pathlib import Path

from configs.schema import Config
from learner.launch.reward_source import problem_with_reward
from replay.channel import KeysError, load_keys
from replay.fingerprint import model_fingerprint
from replay.prompts import load_rows


class PreflightError(ValueError):
    """Something the configuration names cannot be used; the message says what to do."""


def check_files(config: Config) -> None:
    """Model folder, data files, reward function, trackers, keys, run folder and port.

    Raises:
        PreflightError: model folder missing, weights cut short, no such reward function, a tracker is not installed,
            too few evaluation prompts, keys that cannot be used, run folder not writable, or port taken.
        FingerprintError: a file of the model folder is missing or broken.
        DataError: a data file is missing or has a broken row.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise PreflightError(
            f"model.path: no folder {config.model.path!r}; give a Hugging Face folder with config.json, safetensors and"
            " a tokenizer (python -m learner.examples.sort6 --out data/sort6 makes the quick start's)"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise PreflightError(
            f"model.path: {config.model.path!r} has no *.safetensors file; copy or download the folder again, or save"
            " the model with save_pretrained"
        )
    for file in weights:
        check_safetensors(file)
    model_fingerprint(config.model.path, config.model.chat_template)
    load_rows(config.data.train)
    if config.data.eval is not None and config.evaluation.every_steps:
        rows = load_rows(config.data.eval)
        if len(rows) < config.evaluation.num_prompts:
            raise PreflightError(
                f"evaluation.num_prompts: {config.evaluation.num_prompts} asked for, {config.data.eval} has {len(rows)}"
                " rows; lower it or give more rows"
            )
    if config.placement.local_rollouts:  # elsewhere, the file may lie on the rollout nodes alone
        problem = problem_with_reward(config.reward.function)
        if problem is not None:
            raise PreflightError(f"reward.function: {config.reward.function!r}: {problem}")
    check_trackers(config)
    check_keys(config)
    check_run_dir(config)
    check_port(config)


def check_available(config: Config, *, runs_servers: bool) -> None:
    """What cannot run with what is installed here.

    Args:
        config: of the run.
        runs_servers: whether rollout servers run on this machine.

    Raises:
        PreflightError: the engine is not installed, or the bus cannot work on this device.
    """
    if config.weight_bus.transport == "collective" and config.weight_bus.backend == "ucc":
        check_ucc(config)
    if config.weight_bus.backend == "nccl" and config.placement.device == "cpu":
        raise PreflightError("weight_bus.backend: 'nccl' needs GPUs, placement.device is 'cpu'; take 'gloo'")
    if runs_servers and config.rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise PreflightError(
            "rollout.engine: 'sglang' is not installed here; install the extra: pip install 'slipstream-rl[sglang]', or"
            " take 'torch' for a small model"
        )


def check_ucc(config: Config) -> None:
    """Raises PreflightError when there is no UCC on this machine, or weight_bus.apply is `direct`."""
    if config.weight_bus.apply == "direct":
        raise PreflightError("weight_bus.backend: 'ucc' does not go with weight_bus.apply: direct; take apply: staged")
    from weight_bus import WeightBusError  # here, because it imports torch, which the launcher does without
    from weight_bus.transports import resolve_ucc

    try:
        resolve_ucc()
    except WeightBusError as error:
        raise PreflightError(str(error)) from error


def check_safetensors(file: Path) -> None:
    """Raises PreflightError when the file is not as long as its header says (8 bytes of length, then JSON)."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"{size} bytes, its header says {expected}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise PreflightError(f"model.path: {file} is broken ({error}); copy or download the file again") from error


def check_trackers(config: Config) -> None:
    """Raises PreflightError when the package of a tracker is not installed."""
    wanted = {
        "tensorboard": config.tracking.tensorboard and "true",
        "wandb": config.tracking.wandb != "off" and config.tracking.wandb,
    }
    for package, value in wanted.items():
        if value and importlib.util.find_spec(package) is None:
            raise PreflightError(
                f"tracking.{package}: {value}, and {package} is not installed; install the extra:"
                f" pip install 'slipstream-rl[{package}]', or leave tracking.{package} out"
            )


def check_keys(config: Config) -> None:
    """Raises PreflightError when network.keys is no folder of keys with which this node can serve."""
    try:
        keys = load_keys(config.network.keys)
        if keys is not None:
            keys.serving_secret()
    except KeysError as error:
        raise PreflightError(str(error)) from error
    if keys is not None and keys.client_public not in keys.clients:
        raise PreflightError(
            f"network.keys: {keys.folder / 'clients'} admits {', '.join(keys.clients.values())}, but not the key"
            f" {keys.name!r} that this node connects with; copy the whole folder that `python -m replay.keys` made"
        )


def check_run_dir(config: Config) -> None:
    """Raises PreflightError when the run folder cannot be made."""
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not writable" if folder.is_dir() else "is a file"
        raise PreflightError(f"run.dir: {config.run.dir!r}: {folder} {why}; name a folder that this user may write to")


def check_port(config: Config) -> None:
    """Raises PreflightError when replay's port is taken."""
    port = config.network.replay_port
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.network.host, port))
        except OSError as error:
            raise PreflightError(
                f"network.replay_port: {port} on {config.network.host} cannot be bound ({error.strerror}); another run"
                " may use it; choose another port, or 0 for a free one"
            ) from error


def free_run_name(config: Config) -> str:
    """`run.name`, or `name-2`, `name-3`, ... where earlier runs have their folders: nothing is overwritten."""
    name, number = config.run.name, 2
    while (Path(config.run.dir) / name / "config.yaml").exists():
        name = f"{config.run.name}-{number}"
        number += 1
    return name
