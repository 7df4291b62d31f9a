"""Teachers before a run: folders, tokenizers, devices and memory, and whether rows have what they ask for. No torch."""

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import BadPlacement, Contradiction, InputMissing, NoRoom
from configs.schema import Config
from configs.teachers import Scoring, Teacher
from learner.beside.folders import check_folders
from replay.data import Reading, read_rows
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.teachers import TeacherError
from rollout_server.teachers.prompts import teacher_of, with_context
from slipstream.check.finding import Finding, ok
from slipstream.check.machine import on_gpus
from slipstream.check.memory import ENGINE_SHARE, GIB, gpu_bytes
from slipstream.check.model_folders import check_weights
from slipstream.check.prompts import SAMPLED_ROWS
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes
from slipstream.families.table import family_of
from slipstream.runtime.fingerprint import model_fingerprint, read_json


def check(config: Config) -> Iterator[Finding]:
    """Raises ConfigError, FingerprintError: a teacher cannot score this run's answers."""
    for name, teacher in config.teachers.items():
        _check_scores(config, name, teacher)
        # elsewhere, its folder may lie on other nodes alone, and a playback needs none
        if teacher.path is not None and (teacher.where == "learner" or config.placement.local_rollouts):
            _check_folder(config, f"teachers.{name}.path", teacher)
        _check_devices(config, name, teacher)
        yield ok("teachers", f"{name}: {teacher.path or teacher.url or f'of {teacher.of}'}")
    if config.scoring is not None:
        _check_policy(config, config.scoring)
    for train in config.data.train_sets.values() if config.scoring is not None else ():
        _check_rows(config, train.path)


def _check_scores(config: Config, name: str, teacher: Teacher) -> None:
    """Logprobs are those at the sampling temperature."""
    temperature, engine = config.rollout.temperature, config.rollout.engine
    fixed = {"url": "an endpoint", "policy": f"rollout.engine {engine!r}"}.get(teacher.kind)
    if temperature != 1 and fixed is not None and (teacher.kind == "url" or not config.rollout.facts.has_own_decoder):
        raise Contradiction(
            f"teachers.{name}: {fixed} gives logprobs of prompts at temperature 1, and rollout.temperature is"
            f" {temperature:g}; take rollout.temperature=1.0, or a teacher with a process of its own (path)"
        )
    variable = teacher.key_variable if config.placement.local_rollouts else None
    if variable is not None and not os.environ.get(variable):
        raise InputMissing(
            f"teachers.{name}.key_variable: no environment variable {variable} here; set it where the"
            " rollout servers start"
        )


def _check_folder(config: Config, key: str, teacher: Teacher) -> None:
    """A model that the engine computes, with the run's tokenizer, and long enough."""
    if teacher.where == "learner":
        check_folders(config)  # as the check of the model folders, so that the same cause is one
    folder = Path(str(teacher.path))
    if not folder.is_dir():
        raise InputMissing(f"{key}: no folder {str(folder)!r}; give a Hugging Face folder with the run's tokenizer")
    check_weights(folder, key)
    own, run_s = model_fingerprint(str(folder)), model_fingerprint(config.model.path)
    if own["tokenizer"] != run_s["tokenizer"]:
        raise Contradiction(
            f"{key}: {str(folder)!r} has the tokenizer {own['tokenizer']}, and model.path {config.model.path!r} has"
            f" {run_s['tokenizer']}: the ids of answers would mean other texts to it; take a teacher with the tokenizer"
            " of model.path"
        )
    described = read_json(folder / "config.json")
    try:
        family = family_of(described)
    except LookupError as error:
        raise InputMissing(f"{key}: {folder} {error.args[0]}") from error
    if config.rollout.facts.has_own_decoder and not family.in_torch_engine:
        raise Contradiction(f"{key}: rollout.engine {config.rollout.engine!r} computes no {family.model_type} model")
    _check_length(config, key, described)


def _check_policy(config: Config, scoring: Scoring) -> None:
    """Its engine has room for prompts with `context`, and its vocabulary for what is asked of each token."""
    described = read_json(Path(config.model.path) / "config.json")
    if any(teacher.context is not None for teacher in scoring.teachers.values()):
        _check_length(config, "model.path", described)
    if scoring.k > (words := int(decoder_of(described)["vocab_size"])):
        raise Contradiction(
            f"algorithm.distillation: option 'k' is {scoring.k}, and model.path has a vocabulary of {words}; lower it,"
            " or take 'full' with a teacher where: learner"
        )


def _check_length(config: Config, key: str, described: dict[str, Any]) -> None:
    limit, longest = decoder_of(described).get("max_position_embeddings"), config.scored_context
    if isinstance(limit, int) and longest > limit:
        raise Contradiction(
            f"{key}: it has max_position_embeddings {limit}, and is to score {longest} tokens (data.max_prompt_tokens,"
            " twice with `context`, and rollout.max_new_tokens); lower one of them"
        )


def _check_devices(config: Config, name: str, teacher: Teacher) -> None:
    """GPUs for its processes, with room for its weights."""
    if not teacher.has_process or not on_gpus(config):
        return
    if not teacher.processes:
        raise BadPlacement(
            f"teachers.{name}.devices: missing; give its processes GPUs, such as 'node0:7', which the placement leaves"
            " free (or shares: placement.share_gpus=true)"
        )
    sizes = Sizes.of(decoder_of(read_json(Path(teacher.path or config.model.path) / "config.json")))
    given = config.placement.gpu_gib
    there = int(given * GIB) if given is not None else gpu_bytes()
    for node, devices in teacher.processes if there is not None else ():
        needs = sizes.parameters * (4 if config.rollout.dtype == "float32" else 2) / len(devices)
        if needs > ENGINE_SHARE * (there or math.inf):
            raise NoRoom(
                f"teachers.{name}.devices: its weights take {needs / GIB:.1f} GiB on each of {len(devices)} GPUs of"
                f" {node}, which have {(there or 0) / GIB:.1f} GiB; give it more, or take a smaller teacher"
            )


def _check_rows(config: Config, path: str) -> None:
    """The first rows of a training set have a teacher, and the columns of its context."""
    assert config.scoring is not None
    rows = read_rows(path, lambda _: None, Reading(path, config.data.on_broken_row))
    for number, row in enumerate(itertools.islice(rows, SAMPLED_ROWS), start=1):
        try:
            name = teacher_of(config.scoring, row)
            with_context(name, config.scoring.teachers[name], row)
        except (TeacherError, LeaseFailed) as problem:
            said = problem.detail if isinstance(problem, LeaseFailed) else str(problem)
            raise InputMissing(f"{path}: row {number}: {said}") from problem
