"""What is trained on what: the model folder, the prompts, and the reward that judges the answers."""

import os
import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from configs.base import ModelFolder, Own, OwnPath, Section
from configs.evaluation import EvaluationSet, named_sets
from configs.rewards import Code, Mathematics, RewardPart, checked_function, parts_of
from slipstream.families.table import adopt

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""Services that accelerate.tracking knows, by its names, which are those of their packages."""
TAKEN = {
    *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "tokenizer_kwargs"),
}
"""Arguments of rendering that are no options of a template."""


class Model(Section):
    """The Hugging Face folder that training starts from."""

    path: Own[ModelFolder]
    """Folder with config.json, safetensors and a tokenizer, of a family in docs/reference/families.md, or a checkpoint
    of a run (`runs/a/checkpoints/step_40` or `.../best`), of which its hf/ is taken, or a run (`runs/a`), whose newest
    one is."""
    family: OwnPath[str | None] = None
    """File of Python with a record of the model's family, where ours have none or a wrong one
    (docs/reference/families.md)."""
    chat_template: Own[str | None] = None
    """Jinja chat template, or the path of a file with one; none takes the tokenizer's own."""
    chat_template_options: Own[dict[str, bool | int | float | str]] = Field(default={})
    """What the chat template is given besides the messages, for example {enable_thinking: false}."""

    @field_validator("family")
    @classmethod
    def _is_adopted(cls, value: str | None) -> str | None:
        if value is not None:
            adopt(value)  # in every process, for each reads its configuration
        return value

    @field_validator("chat_template_options")
    @classmethod
    def _leaves_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(TAKEN & value.keys()):
            raise ValueError(f"{taken[0]!r} is set for every prompt; leave it out")
        return value


class TrainSet(Section):
    """One dataset of several, by name."""

    path: str
    """As data.train."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Data(Section):
    """Prompts for training and evaluation. Column conventions of verl, slime and TRL are detected."""

    train: Own[str | dict[str, TrainSet]]
    """Prompts, one a row: a JSONL or parquet file, a folder or pattern of them, a folder of Hugging Face
    datasets, `datasets:NAME` of a hub, `reasoning_gym:FAMILY?seed=1`, or `path/to/file.py:name` of your own
    (docs/howto/data.md). `?suffix=` follows every prompt of files. Several by name: {gsm8k: gsm8k.parquet, sums:
    {path: ..., weight: 2}}; without weights, by their rows."""
    eval: Own[str | dict[str, EvaluationSet] | None] = None
    """The same for evaluation, of which the first rows are taken, or several by name:
    {aime: aime.jsonl, gsm8k: {path: ..., samples: 4}},
    each with its own settings of `evaluation` where wanted; none switches evaluation off."""
    held_out: Own[str | None] = None
    """With learner.objective `sft` or `dpo`: rows with answers, as in train, whose loss is measured without training on
    them, every evaluation.every_steps steps and after the last (`eval/loss`); the first evaluation.num_prompts."""
    curriculum: str = "none"
    """`none`; the name of a column (or of a key of extra_info) with numbers: every pass from small to large; or
    `pass_rate`: a later pass begins with prompts that were solved sometimes."""
    on_broken_row: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used: `refuse` names up to ten; `skip` counts them, and leases none."""
    shuffle: bool = True
    """Shuffle the rows anew in each pass over the data (seeded by run.seed and the pass)."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A prompt longer than this is refused when it is leased, and counted as `prompt_too_long`; where learner.objective
    learns from data.train, a row longer than this and rollout.max_new_tokens together."""
    loss_roles: list[Literal["system", "user", "assistant", "tool"]] = Field(default=["assistant"], min_length=1)
    """Whose messages are in the loss, where learner.objective learns from conversations in data.train."""

    @property
    def train_sets(self) -> dict[str, TrainSet]:
        """data.train by name; the name is empty where it is one dataset."""
        return {"": TrainSet(path=self.train)} if isinstance(self.train, str) else self.train

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _sets_have_names(cls, value: object, info: ValidationInfo) -> object:
        if info.field_name == "train":
            return named_sets(value, TrainSet)
        return None if value is None else named_sets(value, EvaluationSet)

    @field_validator("train")
    @classmethod
    def _all_have_weights_or_none(cls, value: str | dict[str, TrainSet]) -> str | dict[str, TrainSet]:
        without = [name for name, one in value.items() if one.weight is None] if isinstance(value, dict) else []
        if 0 < len(without) < len(value):
            raise ValueError(f"{without[0]!r} has no weight, and others have one; give every dataset a weight")
        return value


class Reward(Section):
    """How an answer is judged. Reward code runs in processes that are killed when they take too long."""

    function: str | dict[str, Any] | None = None
    """Has to be given: `exact`, `numeric`, `math` or another built-in reward, `package.module:function`,
    `path/to/file.py:function`, or `environment`: what environment.function says; or several with weights and options,
    as {numeric: 1, format: {weight: 0.2}}."""
    workers: Own[int] = Field(default=0, ge=0, le=256)
    """Reward processes per rollout server; 0 is a quarter of the machine's cores, shared by its servers, up to 8."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A call that takes longer is killed and counts as a reward error."""
    memory_bytes: Own[int] = Field(default=8 * 1024**3, ge=64 * 1024**2)
    """Address space of one reward process; a call that needs more fails as a reward error."""
    max_file_bytes: Own[int] = Field(default=64 * 1024**2, ge=0)
    """Largest file that reward code may write."""
    max_open_files: Own[int] = Field(default=256, ge=32)
    """Files and sockets that one reward process may have open."""
    on_error: Literal["leave_out", "score"] = "leave_out"
    """An answer whose call failed: `leave_out` trains its group without it; `score` gives it reward.error_score."""
    error_score: float = Field(default=0.0, allow_inf_nan=False)
    """With reward.on_error `score`."""
    max_error_rate: float = Field(default=0.2, ge=0, le=1)
    """Above this share of failed answers among the last 512, or of failed episodes, the run stops and names the last
    error. An evaluation of which a larger share fails is void."""

    @field_validator("function", mode="before")
    @classmethod
    def _names_functions(cls, value: object) -> object:
        return None if value is None else checked_function(value)

    @model_validator(mode="after")
    def _parts_have_time(self) -> "Reward":
        """What a built-in reward gives up by itself is a score, past timeout_s it would be an error."""
        limits = {Code: "wall_s", Mathematics: "seconds"}
        found = [
            (f"function.{part.label}.{key}", float(getattr(part.settings, key)))
            for part in self.parts
            for kind, key in limits.items()
            if isinstance(part.settings, kind)
        ]
        needed = sum(seconds for _, seconds in found)
        if needed >= self.timeout_s:
            raise ValueError(
                f"{' and '.join(name for name, _ in found)}: {needed:g} s of judging do not fit into reward.timeout_s"
                f" {self.timeout_s:g}, after which it is an error; raise that above it"
            )
        return self

    def num_workers(self, servers: int = 1) -> int:
        """`workers`, or what this machine has cores for, with so many rollout servers on it."""
        return self.workers or max(1, min(8, len(os.sched_getaffinity(0)) // (4 * servers)))

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """The functions whose weighted scores are the reward."""
        return parts_of(self.function)

    @property
    def shown(self) -> str:
        """For messages: `numeric + 0.2 format`."""
        if not isinstance(self.function, dict):
            return self.function or "none"
        return " + ".join(p.label if p.weight == 1 else f"{p.weight:g} {p.label}" for p in self.parts)


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, and what the terminal shows."""

    live: Literal["auto", "rich", "plain", "off"] = "auto"
    """`rich` redraws a panel, `plain` prints a line per step, `auto` takes rich on a terminal."""
    trackers: list[Tracker] = Field(default=[])
    """Services that get every row of metrics.jsonl as well, such as [tensorboard, wandb] (docs/metrics.md)."""
    tracker_options: Own[dict[Tracker, dict[str, Any]]] = Field(default={})
    """By tracker: arguments of its own start, such as `{wandb: {mode: offline, entity: my-team}}`."""
    project: str = "slipstream"
    """Project, or experiment, that a tracker files the run under."""
    prometheus: Own[str | None] = None
    """Loopback address at which each process serves its numbers to Prometheus, such as 127.0.0.1 (extra `prometheus`);
    null serves none. An address that others reach needs network.insecure."""
    save_rollouts_every: int = Field(default=0, ge=0)
    """Write the trained trajectories of every so many steps to rollouts/step_N/; 0 writes none."""
    plot: bool = True
    """Write plots/summary.png at the end of the run."""
    profile: str = ""
    """Steps to trace, `3:6` for 3, 4 and 5: spans of every process and torch's profile of the learner ranks, merged
    into one file for Perfetto in the run folder. `--profile 3:6` is short for it."""

    @property
    def profiled(self) -> range:
        """Steps that are traced; empty without any."""
        first, _, end = self.profile.partition(":")
        return range(int(first), int(end)) if self.profile else range(0)

    def versions(self, *, behind: int) -> range:
        """Versions that a process has while it records: what lies in the window may begin and end so many steps off."""
        steps = self.profiled
        return range(steps.start - 1 - behind, steps.stop + behind) if steps else steps

    @field_validator("profile", mode="before")
    @classmethod
    def _check_profile(cls, value: Any) -> Any:
        ends = re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", str(value))
        if value != "" and (ends is None or int(ends[1]) >= int(ends[2])):
            raise ValueError(f"{value!r}: give the first step, counted from 1, and the first one after them: 3:6")
        return value

    @field_validator("trackers")
    @classmethod
    def _are_named_once(cls, value: list[Tracker]) -> list[Tracker]:
        if len(set(value)) < len(value):
            raise ValueError("name each tracker once, such as [tensorboard, wandb]")
        return value

    @model_validator(mode="after")
    def _options_have_a_tracker(self) -> "Tracking":
        if unused := sorted(set(self.tracker_options) - set(self.trackers)):
            raise ValueError(f"tracker_options.{unused[0]}: add {unused[0]} to tracking.trackers, or leave this out")
        return self
