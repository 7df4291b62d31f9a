"""What is trained on what: the model folder, the prompts, and the reward that judges the answers."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from configs.base import Section
from configs.evaluation import EvaluationSet, checked_sets


class Model(Section):
    """The Hugging Face folder that training starts from."""

    path: str
    """Folder with config.json, safetensors and a tokenizer (Qwen2, Qwen3 or Llama family), or a checkpoint of a run
    (`runs/a/checkpoints/step_40` or `.../best`), of which its hf/ is taken."""
    chat_template: str | None = None
    """Jinja chat template, or the path of a file with one; none takes the tokenizer's own."""

    @field_validator("path")
    @classmethod
    def _is_weights_of_a_checkpoint(cls, value: str) -> str:
        folder = Path(value)
        if folder.is_symlink():
            folder = folder.parent / folder.readlink()  # `best` may be another one tomorrow
        is_checkpoint = (folder / "hf").is_dir() and not (folder / "config.json").exists()
        return str(folder / "hf") if is_checkpoint else value


class Data(Section):
    """Prompts for training and evaluation. Column conventions of verl, slime and TRL are detected."""

    train: str
    """JSONL or parquet file with one prompt a row."""
    eval: str | dict[str, EvaluationSet] | None = None
    """JSONL or parquet file for evaluation, or several by name: {aime: aime.jsonl, gsm8k: {path: ..., samples: 4}},
    each with its own settings of `evaluation` where wanted; none switches evaluation off."""
    shuffle: bool = True
    """Shuffle the rows anew in each pass over the data (seeded by run.seed and the pass)."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A prompt longer than this is refused when it is leased, and counted as `prompt_too_long`."""

    @field_validator("eval", mode="before")
    @classmethod
    def _sets_have_names(cls, value: object) -> object:
        return checked_sets(value)


class RewardModel(Section):
    """A scalar reward model: a Hugging Face folder of a sequence classification model with one label."""

    path: str | None = None
    """Folder with config.json, safetensors and a tokenizer; unset: no reward model."""
    weight: float | None = Field(default=None, allow_inf_nan=False)
    """The reward is that of `reward.function` plus this times the model's score; 0 makes the score a metric alone."""
    chat_template: str | None = None
    """Jinja chat template of the reward model, or the path of a file with one; none takes its tokenizer's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of its weights; `auto` is float32 where the reward server runs on a CPU, bfloat16 on GPUs."""
    devices: int = Field(default=1, ge=1)
    """Devices of `placement.reward` per reward server; accelerate spreads the model over them."""
    max_memory: dict[str, str] | None = None
    """Most memory for weights by device, as in accelerate, for example `{0: 20GiB, cpu: 60GiB}`; devices count from 0
    within a reward server. What fits into none of them is refused."""
    max_tokens_per_batch: int = Field(default=16384, ge=1)
    """Tokens of one forward, padding included; a longer conversation runs alone."""
    timeout_s: float = Field(default=120.0, gt=0)
    """How long a request may take, waiting and a restart of the reward server included; then it is a reward error."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of a reward server."""

    @field_validator("dtype")
    @classmethod
    def _stands_alone(cls, value: str | bool, info: ValidationInfo) -> str | bool:
        """In place of the base's: `auto` is resolved by the reward server, whose device is not that of the run."""
        return value

    @field_validator("max_memory", mode="before")
    @classmethod
    def _is_of_accelerate(cls, value: Any) -> Any:
        """YAML reads the number of a device as a number."""
        if not isinstance(value, dict):
            return value
        limits = {str(device): limit for device, limit in value.items()}
        for device, limit in limits.items():
            if not re.fullmatch(r"\d+|cpu", device) or not re.fullmatch(r"\d+(\.\d+)?[KMG]i?B", str(limit)):
                raise ValueError(f"{device}: {limit} is not of the form {{0: 20GiB, cpu: 60GiB}}")
        return limits


class Reward(Section):
    """How an answer is judged. Reward code runs in processes that are killed when they take too long."""

    function: str = "exact"
    """`exact`, `numeric`, `package.module:function`, `path/to/file.py:function`, or `model`: the reward model alone."""
    model: RewardModel = RewardModel()
    """The reward model, in place of a function or beside one."""
    workers: int = Field(default=1, ge=1, le=256)
    """Reward processes per rollout server."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer is killed and counts as a reward error."""
    memory_bytes: int = Field(default=8 * 1024**3, ge=64 * 1024**2)
    """Address space of one reward process; a call that needs more fails as a reward error."""
    max_file_bytes: int = Field(default=64 * 1024**2, ge=0)
    """Largest file that reward code may write."""
    max_open_files: int = Field(default=256, ge=32)
    """Files and sockets that one reward process may have open."""
    max_error_rate: float = Field(default=0.2, ge=0, le=1)
    """Above this share of groups with a failed call among the last 32 the run stops and names the last error."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, and what the terminal shows."""

    live: Literal["auto", "rich", "plain", "off"] = "auto"
    """`rich` redraws a panel, `plain` prints a line per step, `auto` takes rich on a terminal."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (extra `tensorboard`)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; `offline` needs no account (extra `wandb`)."""
    wandb_project: str = "slipstream"
    """Project name in Weights & Biases."""
    save_rollouts_every: int = Field(default=0, ge=0)
    """Write the trained trajectories of every so many steps to rollouts/step_N/; 0 writes none."""
    plot: bool = True
    """Write plots/summary.png at the end of the run."""
