"""Evaluation: which prompts, how many answers to each of them, and what counts as solved."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, TypeAdapter

from configs.base import Section

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TEXT_BYTES_PER_TOKEN = 6
"""Of an answer, at the most: what bounds the size of a result. English text has about 4."""
MAX_TEXT_BYTES = 32 * 1024**2
"""Of the answers in one result, which travels as one message: half of what a header may have."""


class EvaluationSet(Section):
    """One set of data.eval by name. What it leaves out, or gives as null, is as in `evaluation`; one that gives
    `samples` is sampled, unless it says `sampled: false`."""

    path: str
    """As data.train; the first rows are taken."""
    num_prompts: int | None = Field(default=None, ge=1)
    greedy: bool | None = None
    sampled: bool | None = None
    samples: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_new_tokens: int | None = Field(default=None, ge=1)
    solved_at: float | None = Field(default=None, allow_inf_nan=False)


class Evaluation(Section):
    """Evaluation at one stated version, beside training. A set of data.eval may have its own values of all but
    every_steps and deadline_s."""

    every_steps: int = Field(default=10, ge=0)
    """Evaluate versions that are multiples of this, version 0 and the last; 0 switches it off."""
    num_prompts: int = Field(default=512, ge=1)
    """Prompts to evaluate, from the start of each file of data.eval; a smaller file is evaluated whole."""
    greedy: bool = True
    """One greedy answer a prompt."""
    sampled: bool = True
    """`samples` answers a prompt at `temperature`."""
    samples: int = Field(default=1, ge=1)
    """Sampled answers a prompt: k of mean@k and pass@k."""
    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of sampled answers; null takes rollout.temperature."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Of an answer; null takes rollout.max_new_tokens. More than that makes the engines' context larger."""
    solved_at: float = Field(default=1.0, allow_inf_nan=False)
    """An answer with this reward or more counts as solved, for pass@k."""
    deadline_s: float = Field(default=300.0, gt=0)
    """An evaluation of all sets that takes longer is given up, counted and named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A set with all its settings; its name is empty where data.eval is one file."""

    name: str
    path: str
    num_prompts: int
    greedy: bool
    samples: int
    """Sampled answers a prompt; 0 where only greedy ones are wanted."""
    temperature: float
    max_new_tokens: int
    solved_at: float

    @property
    def scores(self) -> list[str]:
        """Names of its mean rewards and pass rates in metrics.jsonl, where it has a name (learner/record)."""
        if self.samples <= 1:
            kinds = ["sampled"] * self.samples
        else:
            kinds = [f"reward/{what}" for what in (f"mean@{self.samples}", "pass@1", f"pass@{self.samples}")]
        return [f"val-core/{self.name}/{kind}" for kind in (["greedy"] * self.greedy + kinds)]

    @property
    def key(self) -> str:
        """What the user calls it."""
        return f"data.eval.{self.name}" if self.name else "data.eval"


def named_sets(value: object, kind: type[Section]) -> object:
    """One file, or sets by name, each checked under its own key; `name: path` is short for one of that path.

    Raises:
        ValueError: neither a file nor sets, no set at all, or a name that cannot stand in metrics and file names.
        ValidationError: a setting of a set is refused; its place is below the set's name.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("give one file, or sets by name, such as {aime: data/aime.jsonl, gsm8k: data/gsm8k.parquet}")
    if not value:
        raise ValueError("names no set; give at least one as `name: file` (data.eval: or null, for no evaluation)")
    for name in value:
        if not isinstance(name, str) or not SET_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a set: the name becomes a part of metric and file names; take letters, digits,"
                " '.', '_' and '-', the first one no sign (in YAML, quote a name of digits alone)"
            )
    given = {name: {"path": one} if isinstance(one, str) else one for name, one in value.items()}
    return TypeAdapter(dict[str, kind]).validate_python(given)  # type: ignore[valid-type]


def prompt_sets(
    given: str | Mapping[str, EvaluationSet], evaluation: Evaluation, *, temperature: float, max_new_tokens: int
) -> tuple[PromptSet, ...]:
    """The sets of data.eval in their order, each setting its own, else that of `evaluation`, else the run's."""
    defaults = evaluation.model_dump(exclude={"every_steps", "deadline_s"})
    sets = {"": EvaluationSet(path=given)} if isinstance(given, str) else given
    found = []
    for name, one in sets.items():
        settings = defaults | one.model_dump(exclude_none=True)
        is_sampled = settings.pop("sampled") or (one.samples is not None and one.sampled is None)
        settings["samples"] *= is_sampled
        settings["temperature"] = settings["temperature"] or temperature
        settings["max_new_tokens"] = settings["max_new_tokens"] or max_new_tokens
        found.append(PromptSet(name=name, **settings))
    return tuple(found)


def check_metric(sets: tuple[PromptSet, ...], metric: str) -> None:
    """Raises ValueError where the numbers of named sets are known, and `metric` is none of them."""
    kind, _, rest = metric.partition("/")
    possible = [name for one in sets for name in one.scores]
    if kind == "val-aux" and any(rest.startswith(f"{one.name}/") for one in sets):
        return
    if sets and all(one.name for one in sets) and metric not in possible:
        raise ValueError(
            f"checkpoint.best_metric: {metric!r} is not among what the sets of data.eval measure; take"
            f" {' or '.join(possible)}"
        )


def check(sets: tuple[PromptSet, ...], evaluation: Evaluation) -> None:
    """Raises ValueError where several answers are wanted and none is sampled, or those to a prompt fit no message."""
    if sets and evaluation.samples > 1 and not any(one.samples for one in sets):
        raise ValueError(
            f"evaluation.samples: {evaluation.samples} with evaluation.sampled false, so no answer is sampled; set"
            " evaluation.sampled=true, or samples to 1"
        )
    for one in sets:
        if one.name and not one.greedy and not one.samples:
            raise ValueError(
                f"{one.key}: neither greedy nor sampled, so nothing of it is measured; set one of them, or leave the"
                " set out"
            )
        most = MAX_TEXT_BYTES // (one.max_new_tokens * TEXT_BYTES_PER_TOKEN)
        if one.samples > max(1, most):
            raise ValueError(
                f"{one.key}: samples {one.samples} answers of up to max_new_tokens {one.max_new_tokens} to a prompt are"
                f" more than one message holds ({MAX_TEXT_BYTES // 1024**2} MiB of text); take samples {max(1, most)}"
                " or fewer, or shorter answers"
            )
