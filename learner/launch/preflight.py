"""Before any process starts: the quick start's input is made, and all that the configuration names is checked."""

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from configs.base import ConfigError
from configs.errors import BadValue, Contradiction, InputMissing, NoRoom, PackageMissing
from configs.evaluation import PromptSet
from configs.loading import QUICKSTART, dump, find
from configs.schema import Config
from learner.beside.folders import check_folders
from learner.checkpoints.folders import MARK, incomplete
from learner.launch.picture_check import problem_with_pictures
from learner.launch.ports import problem_with_port
from learner.launch.prompt_check import check_prompts
from learner.launch.reward_folder import check_reward_model
from learner.launch.reward_source import (
    declared_loss,
    problem_with_agent,
    problem_with_environment,
    problem_with_loss,
    problem_with_reward,
    problem_with_tools,
)
from learner.launch.terminal import say
from learner.launch.weight_files import check_safetensors
from learner.policy.divisibility import problem_with
from replay.channel import load_keys
from replay.fingerprint import model_fingerprint, read_json
from replay.pictures import decoder_of
from replay.prompts import DataError

WRITTEN = ("*/", "*.jsonl", "config.yaml", "journal/*", "logs/*.log")
"""Of a run folder: what a run that goes on writes to, some of it only after hours."""
INPUT_S = 600.0
"""How long the quick start's input may take, which takes half a minute on a busy machine."""


def input_is_missing(config: Config, source: str) -> bool:
    """Whether `source` is the quick start's preset and its input is not there, so that it can be made."""
    if find(source) != find(QUICKSTART) or not isinstance(config.data.train, str):
        return False
    model, data = Path(config.model.path), Path(config.data.train)
    if data.parent != model.parent:
        return False
    return not ((model / "config.json").exists() and data.exists())


def make_input(config: Config, source: str) -> bool:
    """Run learner.examples.sort6 where its output is missing; returns whether it was made now.

    Several processes may come at once: the script moves its result into place whole, and the first one counts.

    Raises:
        ConfigError: the script failed, or took more than INPUT_S.
    """
    if not input_is_missing(config, source):
        return False
    folder = Path(config.model.path).parent
    say(f"making the quick start's model and prompts in {folder} (once, about 10 s)")
    command = [sys.executable, "-m", "learner.examples.sort6", "--out", str(folder), "--seed", str(config.run.seed)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INPUT_S)
    except subprocess.TimeoutExpired as error:
        raise InputMissing(
            f"model.path: {folder} was not ready after {INPUT_S:g} s; see what holds up {shlex.join(command)}"
        ) from error
    if made.returncode != 0:
        raise InputMissing(f"python -m learner.examples.sort6 failed: {made.stderr.strip()[-500:]}")
    return True


def checks(config: Config, *, has_input: bool = True) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name all that a start looks at; each raises as `check_input` does.

    The dry run of a quick start that is yet to make its model and data has no input.
    """
    if has_input:
        yield "model and data", partial(check_input, config)
    if config.placement.local_rollouts:  # elsewhere, the file may lie on the rollout nodes alone
        yield "reward", partial(check_reward, config, has_data=has_input)
    yield "loss and bus", partial(check_loss, config)
    yield "trackers", partial(check_trackers, config)
    yield "keys", partial(check_keys, config)
    yield "run folder", partial(check_run_dir, config)
    yield "port", partial(check_port, config)


def check_files(config: Config, *, has_input: bool = True) -> None:
    """Model folder, data files, rewards, loss, trackers, keys, run folder and port; raises as `check_input` does."""
    for _, check in checks(config, has_input=has_input):
        check()


def check_reward(config: Config, *, has_data: bool) -> None:
    """Raises ConfigError: reward, environment, tools or reward model cannot be loaded."""
    if (problem := problem_with_reward(config.reward)) is not None:
        raise InputMissing(f"reward.function: {problem}")
    if (problem := problem_with_environment(config.environment.function)) is not None:
        raise InputMissing(f"environment.function: {config.environment.function!r}: {problem}")
    if (problem := problem_with_tools(config.environment)) is not None:
        raise InputMissing(f"environment.options.tools: {problem}")
    if config.environment.function == "agent" and (problem := problem_with_agent(config.environment.options)):
        raise InputMissing(f"environment.options: {problem}")
    check_reward_model(config, has_data=has_data)


def check_loss(config: Config) -> None:
    """Raises ConfigError: the loss cannot be loaded or does not suit the run, or the bus has no GPUs for NCCL."""
    if (problem := problem_with_loss(config.algorithm.loss)) is not None:
        raise InputMissing(f"algorithm.loss: {config.algorithm.loss!r}: {problem}")
    traits = config.algorithm.built_in or declared_loss(config.algorithm.loss)
    if problem := config.problem_with_loss(traits):
        raise Contradiction(problem)
    if config.weight_bus.backend == "nccl" and config.placement.device == "cpu":
        raise Contradiction("weight_bus.backend: 'nccl' needs GPUs, placement.device is 'cpu'; take 'gloo'")


def check_input(config: Config) -> None:
    """Model folder and data files.

    Raises:
        ConfigError: model folder missing, weights cut short, too few positions, sizes that learner.mesh does not
            divide, or of a data file no prompt can be rendered or none fits.
        FingerprintError: a file of the model folder is missing or broken.
        DataError: a data file is missing or has a broken row (among the first 50,000).
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise InputMissing(
            f"model.path: no folder {config.model.path!r}; give a Hugging Face folder with config.json, safetensors and"
            " a tokenizer (python -m learner.examples.sort6 --out data/sort6 makes the quick start's)"
        )
    _check_checkpoint(folder.parent if folder.name == "hf" else folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputMissing(
            f"model.path: {config.model.path!r} has no *.safetensors file; copy or download the folder again, or save"
            " the model with save_pretrained"
        )
    for file in weights:
        check_safetensors(file, "model.path")
    model_fingerprint(config.model.path, config.model.chat_template)
    raw = read_json(folder / "config.json")
    model = decoder_of(raw)
    if problem := problem_with_pictures(config, raw) or problem_with(config.learner.mesh, model):
        raise Contradiction(problem)
    limit = model.get("max_position_embeddings")
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    if isinstance(limit, int) and prompt + answer > limit:
        raise Contradiction(
            f"rollout.max_new_tokens: {answer} after data.max_prompt_tokens {prompt} are {prompt + answer} tokens, and"
            f" {folder / 'config.json'} has max_position_embeddings {limit}; lower one of them"
        )
    check_folders(config)
    for train in config.data.train_sets.values():
        check_prompts(config, train.path, config.data.curriculum)
    for one in config.evaluation_sets:
        if isinstance(limit, int) and prompt + one.max_new_tokens > limit:
            raise Contradiction(
                f"{one.key}: max_new_tokens {one.max_new_tokens} after data.max_prompt_tokens {prompt}, and"
                f" {folder / 'config.json'} has max_position_embeddings {limit}; lower one of them"
            )
        _check_set(config, one)


def _check_set(config: Config, one: PromptSet) -> None:
    try:
        check_prompts(config, one.path)
    except (ConfigError, DataError) as error:
        if not one.name:
            raise
        raise type(error)(f"{one.key}: {error}") from error


def _check_checkpoint(folder: Path) -> None:
    """Raises ConfigError when the folder is a checkpoint that is not complete."""
    if any((folder / name).exists() for name in ("dcp", "state.json", MARK)) and (reason := incomplete(folder)):
        raise InputMissing(
            f"model.path: checkpoint {folder} is not complete ({reason}); its run clears or completes it with"
            " --resume; take another step_N beside it"
        )


def check_available(config: Config, *, runs_servers: bool) -> None:
    """What cannot run with what is installed here; `runs_servers` where rollout servers run on this machine.

    Raises:
        ConfigError: the engine is not installed, or the bus is without UCC.
    """
    if config.weight_bus.transport == "collective" and config.weight_bus.backend == "ucc":
        _check_ucc(config)
    if runs_servers and config.rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise PackageMissing(
            "rollout.engine: 'sglang' is not installed here; install the extra: pip install 'slipstream-rl[sglang]', or"
            " take 'torch' for a small model"
        )


def _check_ucc(config: Config) -> None:
    from weight_bus import WeightBusError  # here, because it imports torch, which the launcher does without
    from weight_bus.transports import resolve_ucc

    try:
        resolve_ucc()
    except WeightBusError as error:
        raise PackageMissing(str(error)) from error


def check_trackers(config: Config) -> None:
    """Raises ConfigError when the package of a tracker or of Prometheus is not installed, or wandb would refuse."""
    tracking = config.tracking
    if "wandb" in tracking.trackers and os.environ.get("WANDB_MODE") == "":
        raise BadValue("tracking.trackers: WANDB_MODE is set, but empty, which wandb refuses; unset WANDB_MODE")
    needed: dict[str, tuple[str, str]]
    needed = {name: (f"tracking.trackers: {name}", name.replace("_", "-")) for name in tracking.trackers}
    if tracking.prometheus is not None:
        needed["prometheus_client"] = (f"tracking.prometheus: {tracking.prometheus}", "prometheus")
    for package, (key, extra) in needed.items():
        if importlib.util.find_spec(package) is None:
            raise PackageMissing(
                f"{key}, and {package} is not installed; install the extra: pip install 'slipstream-rl[{extra}]', or"
                f" leave it out"
            )


def check_keys(config: Config) -> None:
    """Raises KeysError or ConfigError when network.keys is no folder of keys with which this node can serve."""
    keys = load_keys(config.network.keys)
    if keys is None:
        return
    keys.serving_secret()
    if keys.client_public not in keys.clients:
        raise InputMissing(
            f"network.keys: {keys.folder / 'clients'} admits {', '.join(keys.clients.values())}, but not the key"
            f" {keys.name!r} that this node connects with; copy the whole folder that `python -m replay.keys` made"
        )


def check_run_dir(config: Config) -> None:
    """Raises ConfigError: a file cannot be created where the run folder would be, or one of its own be written."""
    folder = Path(config.run_dir).absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(config, folder, error) from error
    for path in sorted(found for pattern in WRITTEN for found in Path(config.run_dir).glob(pattern)):
        if not os.access(path, os.W_OK):
            raise NoRoom(f"run.dir: this user may not write to {path}, and the run will; give it to this user (chown)")


def _not_writable(config: Config, folder: Path, error: OSError) -> NoRoom:
    why = "is a file" if folder.is_file() else f"is not writable ({error.strerror})"
    return NoRoom(f"run.dir: {config.run.dir!r}: {folder} {why}; name a folder that this user may write to")


def claim_run_dir(config: Config, *, new: bool) -> Config:
    """Create the run folder and its config.yaml; config.yaml claims it for one run.

    Returns:
        The configuration, with the next free name where another run of this name has started since the checks.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    claimed = config
    while True:
        folder = Path(claimed.run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path, beside = folder / "config.yaml", folder / "config.yaml.new"
            with (path if new else beside).open("x" if new else "w", encoding="utf-8") as file:
                file.write(dump(claimed))
            if not new:  # whole, or the one before: a disk that is still full must not take the run's configuration
                beside.replace(path)
            return claimed
        except OSError as error:
            if not (isinstance(error, FileExistsError) and folder.is_dir()):
                raise _not_writable(config, folder, error) from error
            claimed = with_free_name(config)


def check_port(config: Config) -> None:
    """Raises ConfigError when replay's port is taken."""
    host, port = config.network.host, config.network.replay_port
    if problem := problem_with_port(host, port):
        raise NoRoom(
            f"network.replay_port: {port} on {host} cannot be bound ({problem}); another run"
            " may use it; choose another port, or 0 for a free one"
        )


def with_free_name(config: Config) -> Config:
    """Under `run.name`, or `name-2`, `name-3`, ... where earlier runs have their folders: nothing is overwritten."""
    name, number = config.run.name, 2
    while (Path(config.run.dir) / name / "config.yaml").exists():
        name = f"{config.run.name}-{number}"
        number += 1
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
