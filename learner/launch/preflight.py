"""Checks of what the configuration names, before any process starts: files, tokenizer, data, port, folder."""

import socket
from pathlib import Path

from configs.schema import Config
from replay.fingerprint import model_fingerprint
from replay.prompts import load_rows


class PreflightError(ValueError):
    """Something the configuration names cannot be used; the message says what to do."""


def check_files(config: Config) -> None:
    """Model folder, data files and port.

    Raises:
        PreflightError: model folder missing, port taken, or too few evaluation prompts.
        FingerprintError: a file of the model folder is missing or broken.
        DataError: a data file is missing or has a broken row.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise PreflightError(
            f"model.path: no folder {config.model.path!r}; give a Hugging Face folder with config.json, safetensors and"
            " a tokenizer (python -m scripts.make_sort6 --out data/sort6 makes the quick start's)"
        )
    if not list(folder.glob("*.safetensors")):
        raise PreflightError(f"model.path: {config.model.path!r} has no *.safetensors file")
    model_fingerprint(config.model.path, config.model.chat_template)
    load_rows(config.data.train)
    if config.data.eval is not None and config.evaluation.every_steps:
        rows = load_rows(config.data.eval)
        if len(rows) < config.evaluation.num_prompts:
            raise PreflightError(
                f"evaluation.num_prompts: {config.evaluation.num_prompts} asked for, {config.data.eval} has {len(rows)}"
                " rows; lower it or give more rows"
            )
    check_port(config)


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
