"""Teachers: models that give the policy's answers logprobs of their own, for algorithm.distillation."""

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.base import ModelFolder, Own, OwnPath, Section
from configs.placement import node_devices
from configs.rewards import checked_address, checked_variable

MOST = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
Value = str | int | float | bool
ONLY_OF = {
    "model": ("url",),
    "key_variable": ("url",),
    "devices": ("path", "lagged", "average"),
    "every": ("lagged", "average"),
    "decay": ("average",),
}
"""Keys that do something for these kinds of teachers alone."""


class Teacher(Section):
    """A model that scores answers: exactly one of `path`, `of` and `url`."""

    path: OwnPath[ModelFolder | None] = None
    """Model that stays as it is: a folder, a checkpoint or a run, as in model.path, with the tokenizer of that."""
    of: Literal["policy", "lagged", "average"] | None = None
    """The policy itself: `policy` is what a rollout server serves, for its own answers with `context`
    (self-distillation); `lagged` a copy of it, made every `every` steps; `average` a moving average of its weights."""
    url: str | None = None
    """An OpenAI-compatible endpoint with logprobs of prompts (SGLang, vLLM) up to `/v1`, such as
    http://10.0.0.7:8000/v1."""
    model: str | None = None
    """With `url`: name of the model there."""
    key_variable: str | None = None
    """With `url`: environment variable of the rollout servers that holds the key; unset: none is sent."""
    where: Literal["own", "learner"] = "own"
    """`own`: a process of its own, which rollout servers ask; `learner`: with `path`, inside the learner's ranks, which
    full vocabularies need."""
    devices: Own[str | None] = None
    """GPUs of its own processes, such as `node0:7`; each part between semicolons is one process over all its
    devices, and several share the load. With placement.share_gpus they may be given to others as well. On a CPU: leave
    it out."""
    every: int = Field(default=5, ge=1)
    """`lagged` and `average`: the teacher gets a new version after each step that is a multiple of this."""
    decay: float = Field(default=0.95, gt=0, lt=1)
    """`average`: what stays of it when a new version joins."""
    rows: dict[str, Value | list[Value]] = Field(default={})
    """Prompts that it is asked for: columns (or `data_source`) with the value, or values, of which a row has one in
    each; empty: all. Of several teachers the first that fits; a row that none fits is an error."""
    context: str | None = None
    """What stands in the place of the last user message in this teacher's prompt alone: text with `{prompt}`, which is
    that message, and columns of the row, such as "{prompt}\\nHint: {hint}"."""
    timeout_s: float = Field(default=60.0, gt=0)
    """For one try of one request."""
    retries: int = Field(default=2, ge=0, le=10)
    """With on_error `leave_out`: further tries; behind `url`, of each request as well."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests of a rollout server under way at a time."""
    on_error: Literal["wait", "leave_out"] = "wait"
    """Where no answer comes: `wait` tries again for `wait_s`, then the run stops and names the teacher; `leave_out`
    drops the group as `teacher_error` after `retries`, which is counted."""
    wait_s: float = Field(default=300.0, gt=0)
    """With on_error `wait`: how long a request is tried, and how long a run goes on without the teacher."""

    @property
    def kind(self) -> str:
        """`path`, `url`, `policy`, `lagged` or `average`."""
        return self.of or ("path" if self.path is not None else "url")

    @property
    def has_process(self) -> bool:
        """Whether it is a process of its own."""
        return self.where == "own" and self.kind in ONLY_OF["devices"]

    @property
    def is_refreshed(self) -> bool:
        """Whether it gets new versions over a weight bus."""
        return self.kind in ONLY_OF["every"]

    @property
    def processes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Node and devices of each of its processes; none where `devices` is left out."""
        parts = [list(node_devices(part, "devices")) for part in (self.devices or "").split(";") if part.strip()]
        return [(part[0][0], tuple(device for _, device in part)) for part in parts]

    @property
    def context_columns(self) -> list[str]:
        """Columns of the row that `context` names."""
        return [name for name in _names_in(self.context or "") if name != "prompt"]

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether it is asked for a prompt with these columns, `data_source` among them."""
        return all(row.get(key) in (value if isinstance(value, list) else [value]) for key, value in self.rows.items())

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else checked_address(value)

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        return None if value is None else checked_variable(value)

    @field_validator("devices")
    @classmethod
    def _are_of_one_node(cls, value: str | None) -> str | None:
        if value is not None and not list(node_devices(value, "devices")):
            raise ValueError("names no device; give node:devices, such as 'node0:7', or leave it out on a CPU")
        return value

    @field_validator("context")
    @classmethod
    def _is_a_template(cls, value: str | None) -> str | None:
        if value is not None and "prompt" not in _names_in(value):
            raise ValueError("has no {prompt}, the last user message; give it, such as '{prompt}\\nHint: {hint}'")
        return value

    @model_validator(mode="after")
    def _is_one_kind(self) -> "Teacher":
        """Raises ValueError with the first thing that is wrong."""
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        given = [name for name in ("path", "of", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"{' and '.join(given) or 'nothing'} says what it is; give exactly one of path, of and url"
        if self.kind == "url" and self.model is None:
            yield "model: missing; give the name of the model behind url"
        if self.kind == "policy" and self.context is None:
            yield "context: missing; without one, `of: policy` gives the logprobs that the answers were sampled with"
        if self.where == "learner" and self.kind != "path":
            yield f"where: 'learner' takes a folder alone, and this is {self.kind!r}; give path, or where: own"
        for key, kinds in ONLY_OF.items():
            is_given = getattr(self, key) != type(self).model_fields[key].default
            if is_given and (self.kind not in kinds or (key == "devices" and self.where == "learner")):
                yield f"{key}: does nothing with {self.kind!r}, where: {self.where!r}; leave it out"


@dataclass(frozen=True, slots=True)
class Scoring:
    """What rollout servers ask teachers for, which travels with each group."""

    teachers: Mapping[str, Teacher]
    k: int
    """Ids with logprobs beside those of each token."""

    @property
    def names(self) -> list[str]:
        """Of the teachers, in the order of the configuration: the number of one is its place here."""
        return list(self.teachers)

    @property
    def longest_s(self) -> float:
        """For which a group waits at most, and its server tells of no new token."""
        return max(t.wait_s if t.on_error == "wait" else (t.retries + 1) * t.timeout_s for t in self.teachers.values())


def _names_in(template: str) -> list[str]:
    """Fields of a template. Raises ValueError: it is broken, or a field is more than a name."""
    fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
    for name, spec, conversion in fields:
        if name is not None and (spec or conversion or not re.fullmatch(r"[A-Za-z_]\w*", name)):
            raise ValueError(f"{{{name}}} is no name of a column; write braces of text twice, as {{{{ and }}}}")
    return [name for name, _, _ in fields if name is not None]


def problems(teachers: Mapping[str, Teacher], *, is_used: bool) -> Iterator[str]:
    """What is wrong with the teachers of a run together; `is_used` where algorithm.distillation is set."""
    if is_used and not teachers:
        yield "algorithm.distillation: without a teacher; name one in `teachers`, such as {big: {path: models/big}}"
    if teachers and not is_used:
        yield (
            "teachers: nothing uses them; set algorithm.distillation to sampled_advantage, sampled, top_k or full, or"
            " leave them out"
        )
    if len(teachers) > MOST:
        yield f"teachers: {len(teachers)} of them, and {MOST} are the most; leave some out"
    if len(teachers) > 1 and (inside := [name for name, one in teachers.items() if one.where == "learner"]):
        yield f"teachers.{inside[0]}.where: 'learner' beside other teachers; inside the learner is room for one alone"
    for name in teachers:
        if not NAME.fullmatch(name):
            yield f"teachers: {name!r} cannot be a name; take letters, digits, '_' and '-', the first one no sign"
    for name, later in zip(teachers, list(teachers)[1:], strict=False):
        if not teachers[name].rows:
            yield f"teachers.{name}.rows: takes every prompt, so {later!r} is never asked; give rows, or put it last"
