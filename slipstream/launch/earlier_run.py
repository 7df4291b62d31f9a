"""`--resume RUN_DIR` and `--replay RUN_DIR`: going on with an earlier run, or training again what its journal holds.

A playback needs no engine; it runs beside the original, as long as its journal, and compares every digest.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import BadRunFolder
from configs.loading import leaf_keys, leaves, load, read_yaml
from configs.schema import Config
from configs.shared import shared_values
from learner.checkpoints.folders import latest_complete
from learner.record import ledger
from replay.journal import FolderLock, JournalError, JournalReader, find_journal
from replay.state.apply import KEPT
from slipstream.launch.run_folder import STARTED_IN, with_free_name
from slipstream.launch.servers import RunFailed
from slipstream.launch.terminal import say
from slipstream.runtime.fingerprint import FingerprintError, model_fingerprint

CHANGES = "config.changes.log"
ENDS_S = 5.0
FIXED = tuple(key for _, _, key in KEPT if key in leaf_keys())
"""Keys that a journal depends on. Of the data, replay compares the contents: its path may change."""


def resumed(run_dir: Path, overrides: list[str], source: str | None = None) -> Config:
    """The run's own configuration, replay's port included: rollout servers elsewhere look for it there.

    Args:
        run_dir: folder of the run.
        overrides: `a.b=c` that change it.
        source: file with the configuration that counts instead of the folder's: a job has its own.

    Raises:
        ConfigError: the folder is no run, the run is past the steps that it shall have, or a key cannot change.
    """
    path, folder = _config_file("--resume", run_dir), run_dir.resolve()
    config = load(source or path, [f"run.name={folder.name}", f"run.dir={folder.parent}", *overrides])
    _check_changes(run_dir, changes(run_dir, overrides, config), config)
    lines, wanted = ledger.read(run_dir), config.learner.total_steps
    done = int(lines[-1]["step"]) if lines else 0
    if wanted < done:
        raise BadRunFolder(
            f"--resume: {run_dir} has made {done} steps, learner.total_steps is {wanted}; give at least {done} with"
            " --steps, or leave it out"
        )
    return config


def go_where_it_started(run_dir: Path) -> Path:
    """Make the folder where the run was started the current one, for its relative paths; stay where that is gone.

    Returns:
        The run folder, absolute.
    """
    folder, path = Path(os.path.abspath(run_dir)), run_dir / STARTED_IN
    before = Path(path.read_text(encoding="utf-8").rstrip("\n")) if path.is_file() else Path.cwd()
    if before != Path.cwd() and before.is_dir():
        os.chdir(before)
        say(f"relative paths begin in {before}, where the run was started")
    return folder


def goes_on(run_dir: Path) -> str:
    """What `--resume` of the folder does: where it begins, and which steps it makes again."""
    found, lines = latest_complete(run_dir)[0], ledger.read(run_dir)
    made = int(lines[-1]["step"]) if lines else 0
    if found is None:
        again = f" and trains the {made} steps that the journal has again" if made else ""
        return f"no checkpoint: --resume {run_dir} starts at step 0{again}"
    kept = int(found.name.removeprefix("step_"))
    again = f" and trains the {made - kept} steps after it again" if made > kept else ""
    return f"--resume {run_dir} goes on at step {kept}{again}"


def check_ended(run_dir: Path) -> None:
    """Have nothing in the folder of a run changed that goes on: what it starts again would read the new config.yaml.

    Raises:
        RunFailed: its replay still writes the journal; one that was just killed has ENDS_S to be gone.
    """
    folder, deadline = run_dir / "journal", time.monotonic() + ENDS_S
    while folder.is_dir():
        try:
            FolderLock(folder).close()
        except JournalError as error:
            if time.monotonic() > deadline:
                raise RunFailed(str(error)) from error  # no refusal: a later start finds that it has ended
            time.sleep(0.1)
        else:
            return


def changes(run_dir: Path, overrides: list[str], config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that have another value in a resumed run than in its config.yaml: (old, new).

    Of what each process has for itself, such as addresses, only those that overrides name.
    """
    before = leaves(read_yaml((run_dir / "config.yaml").read_bytes()))
    after, shared = leaves(config.model_dump(mode="json")), shared_values(config)
    given = tuple(f"{override.partition('=')[0].strip()}." for override in overrides)
    named = [key for key in after if f"{key}.".startswith(given) or key in shared]
    return {key: (before.get(key), after[key]) for key in named if before.get(key) != after[key]}


def described(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """One line a key. Example: `learner.lr: 1e-06 -> 5e-07`."""
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


def log_changes(run_dir: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Append what a resume has changed to config.changes.log: config.yaml has the new values only."""
    if changed:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with (run_dir / CHANGES).open("a", encoding="utf-8") as file:
            file.writelines(f"{now} --resume: {line}\n" for line in described(changed))


def _check_changes(run_dir: Path, changed: Mapping[str, tuple[Any, Any]], config: Config) -> None:
    fixed = {key: changed[key][0] for key in FIXED if key in changed}
    begun = load(run_dir / "config.yaml")
    before, now = map(_scored, (begun, config))
    fixed |= {key: value for key, value in before.items() if now.get(key) != value}
    for name, teacher in begun.teachers.items() if not fixed else ():
        if teacher.path not in (None, config.teachers[name].path) and Path(teacher.path).is_dir():  # else it was moved
            fixed[f"teachers.{name}.path"] = teacher.path
    if fixed:
        key, value = next(iter(fixed.items()))
        raise BadRunFolder(
            f"--resume: {key}: {run_dir} was begun with {value!r}, and its journal depends on it; leave --set {key}"
            " out, or start a new run"
        )
    if not {"model.path", "model.chat_template"} & changed.keys():
        return
    model = config.model
    path, template = (
        changed.get(f"model.{name}", (value, value))[0]
        for name, value in (("path", model.path), ("chat_template", model.chat_template))
    )
    try:
        before = model_fingerprint(path, template)
    except FingerprintError:
        return  # it was moved; the checkpoint has the shapes, and rollout servers and learner compare the rest
    now = model_fingerprint(model.path, model.chat_template)
    if different := [name for name in before if before[name] != now[name]]:
        raise BadRunFolder(
            f"--resume: model.path: {model.path} has another {different[0]} than {path}, with which {run_dir} was"
            " begun; leave --model out, or start a new run from a checkpoint's weights with --model"
        )


def _scored(config: Config) -> dict[str, Any]:
    """By key, what the scores in a journal are of."""
    asked = config.scoring
    if asked is None:
        return {"teachers": []}
    kinds = {
        f"teachers.{name}.{key}": getattr(one, key)
        for name, one in asked.teachers.items()
        for key in ("of", "where", "model", "context")
    }
    return {"teachers": asked.names, "algorithm.distillation": f"k {asked.k}", **kinds}


def played_back(run_dir: Path, overrides: list[str]) -> Config:
    """The configuration of a playback.

    Raises:
        ConfigError: the folder is no run with a journal.
        JournalError: the journal is damaged, or has vanished.
    """
    path, folder = _config_file("--replay", run_dir), run_dir.resolve()
    find_journal(run_dir)
    steps = _last_step(run_dir)
    if steps == 0:
        raise BadRunFolder(f"--replay: {run_dir}/journal holds no step; name the folder of a run that has trained")
    of_run = load(path)
    learner = of_run.learner
    fixed = {
        "run.name": f"{folder.name}-replay",
        "run.dir": folder.parent,
        "learner.total_steps": steps,
        "learner.decay_steps": learner.decay_steps or learner.total_steps,
        "placement.local_rollouts": "false",
        "evaluation.every_steps": 0,
        "checkpoint.keep_best": 0,
        "network.replay_port": 0,
        "replay.journal_dir": "null",
    }
    if len(of_run.shares) > 1:  # all ranks on this host: a digest depends on how many there are, not on where
        fixed |= {"placement.rollout": "null", "placement.learner": "null", "network.host": "127.0.0.1"}
        fixed |= {"placement.split": f"0:{of_run.num_learner_ranks}"}
        fixed |= {f"teachers.{name}.devices": "null" for name in of_run.teachers}
    return with_free_name(load(path, [*(f"{key}={value}" for key, value in fixed.items()), *overrides]))


def _config_file(option: str, run_dir: Path) -> Path:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise BadRunFolder(f"{option}: {path} is missing; name the folder of a run, such as runs/quickstart")
    return path


def _last_step(run_dir: Path) -> int:
    """The last committed step of the surviving line of policies; 0 for none. Raises JournalError."""
    steps: set[int] = set()
    for record in JournalReader(run_dir / "journal").records():
        if record.kind == "diverged":
            steps = {step for step in steps if step <= record.fields["step"]}
        elif record.kind == "snapshot":
            steps |= {step for step, digest, *_ in record.fields["line"] if digest}
        elif record.kind == "commit":
            steps.add(record.fields["step"])
    return max(steps, default=0)


def report(config: Config, code: int) -> int:
    """Print, as JSON, how many digests equal the journal's; exit code 0 only if every one does."""
    lines = ledger.read(config.run_dir)
    different = [line["step"] for line in lines if line["digest"] != line.get("expected")]
    compared = {
        "steps": len(lines),
        "equal": len(lines) - len(different),
        "first_different": different[0] if different else None,
        "last_digest": lines[-1]["digest"] if lines else None,
    }
    sys.stdout.write(json.dumps(compared) + "\n")
    sys.stdout.flush()
    all_equal = compared["equal"] == compared["steps"] == config.learner.total_steps
    return code if code or all_equal else 1
