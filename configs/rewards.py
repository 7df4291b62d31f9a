"""What `reward.function` may be: one name, or several with weights and options; and the options of each built-in."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, create_model, field_validator, model_validator

from configs.base import Section
from configs.errors import did_you_mean


class RewardOptions(Section):
    """What every entry of `reward.function` has."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its score counts in the sum; 0 makes the score a metric alone."""


class Exact(RewardOptions):
    """1 for the ground truth to the letter, ended by the policy itself."""


class Environments(RewardOptions):
    """What environment.function says of its episode; one that says nothing is a reward error."""


class Numeric(RewardOptions):
    """1 where the final number of the answer is the ground truth, as in GSM8K."""

    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Largest difference that counts as equal, times the ground truth where that is above 1."""


class ReasoningGym(RewardOptions):
    """The score of the package reasoning-gym, for rows of data.train `reasoning_gym:FAMILY`."""


class Mathematics(RewardOptions):
    """1 where the last box of the answer is mathematically the ground truth, by the package math-verify."""

    boxed: bool = True
    r"""Only the last `\boxed{}` counts; false takes the end of an answer that has none."""
    seconds: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """For the comparison; what takes longer scores 0 and counts in `gave_up`."""


class Pattern(RewardOptions):
    """1 where a regular expression is found; with a group `answer`, where its last match is the ground truth."""

    pattern: str
    """As in the package regex, which is Python's re with limits of time."""
    whole: bool = False
    """The expression has to match the whole answer."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        import regex  # here, because no other configuration needs it

        try:
            regex.compile(value)
        except regex.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return value


class Form(RewardOptions):
    """1 for an answer of these tags in this order, each once, none empty, and nothing outside them."""

    tags: list[str] = Field(default=["think", "answer"], min_length=1)
    """Names of the tags: `<think>...</think>` and so on."""
    opened: bool = False
    """The chat template has written the first tag already, so the answer begins inside it."""


class Length(RewardOptions):
    """0 for as many tokens as wanted, down to -1 for fewer or more; algorithm.overlong_buffer shapes the limit."""

    max_tokens: int = Field(ge=1)
    """Longer answers cost."""
    min_tokens: int = Field(default=0, ge=0)
    """Shorter answers cost, in proportion to what is missing."""
    buffer: int = Field(default=0, ge=0)
    """Tokens past max_tokens over which the cost grows to 1; 0 costs 1 at once."""

    @model_validator(mode="after")
    def _leaves_lengths(self) -> "Length":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; take less")
        return self


class Code(RewardOptions):
    """1 for a program that passes the tests of its ground truth, run in a sandbox."""

    partial: bool = False
    """Score the share of tests that pass; otherwise all have to, and the first that does not ends the judging."""
    timeout_s: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """Processor time of each test, in seconds."""
    total_s: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """Processor time of all tests of an answer, in seconds."""
    wall_s: float = Field(default=25.0, gt=0, allow_inf_nan=False)
    """Seconds that all tests of an answer may last, for programs that wait; below reward.timeout_s, so that such a
    program scores and is no error."""
    max_tests: int = Field(default=20, ge=1)
    """Tests of an answer that are run, from the first on."""
    memory_bytes: int = Field(default=512 * 1024**2, ge=32 * 1024**2)
    """Address space of a program."""
    processes: int = Field(default=32, ge=1)
    """Processes and threads of a program."""
    allow_unisolated: bool = False
    """Run programs where the machine cannot isolate them: they then may read files and use the network."""


def checked_address(value: str) -> str:
    """The address of an HTTP endpoint. Raises ValueError."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no address; give http://host:port/v1 or https://host/v1")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{value!r} has no port from 1 to 65535; give http://host:port/v1 or https://host/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("has a password or a query in it; give the key in the variable of key_variable")
    return value.rstrip("/")


def checked_variable(value: str) -> str:
    """The name of an environment variable that holds a key. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", value):
        raise ValueError("is no name of an environment variable; the key itself never stands in a configuration")
    return value


class Endpoint(RewardOptions):
    """A model behind an OpenAI-compatible HTTP endpoint."""

    url: str
    """Its address up to `/v1`, such as http://10.0.0.7:8000/v1."""
    model: str
    """Name of the model there."""
    key_variable: str | None = None
    """Environment variable of the rollout servers that holds the key; unset: none is sent."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests of a rollout server under way at a time."""
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """For one try."""
    retries: int = Field(default=2, ge=0, le=10)
    """Further tries, after a broken connection, a timeout, or the status 408, 409, 429 or 5xx."""
    otherwise: float | None = Field(default=None, allow_inf_nan=False)
    """Score of an answer with a refused or unreadable verdict; unset: a reward error, so the prompt is leased again."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return checked_address(value)

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        return None if value is None else checked_variable(value)


class Judge(Endpoint):
    """A language model that grades an answer by a rubric (chat completions)."""

    rubric: str = "Is the answer correct, complete and clear?"
    """What is asked of an answer: text, or the path of a .txt or .md file with it."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best grade; the score is the grade's place between them, from 0 to 1."""
    show_truth: bool = True
    """Show the ground truth to the judge, where there is one."""
    max_tokens: int = Field(default=512, ge=1)
    """Of a verdict."""

    @field_validator("scale")
    @classmethod
    def _has_two_ends(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]):
            raise ValueError("is no scale; give the worst and the best grade, such as [0, 10]")
        return value


class RemoteModel(Endpoint):
    """A reward model that another server serves."""

    api: Literal["embeddings", "classify"] = "embeddings"
    """`embeddings`: POST /embeddings, the score is the only number of the embedding (SGLang with --is-embedding);
    `classify`: POST /classify, it is the probability of the last class (SGLang, vLLM)."""
    chat_template: str | None = None
    """Jinja chat template that makes one text of prompt and answer, or a file with one; plain text needs none."""


SECTIONS: dict[str, type[RewardOptions]] = {
    "exact": Exact,
    "environment": Environments,
    "numeric": Numeric,
    "reasoning_gym": ReasoningGym,
    "math": Mathematics,
    "regex": Pattern,
    "format": Form,
    "length": Length,
    "code": Code,
    "judge": Judge,
    "remote_model": RemoteModel,
}
BuiltIn: type[Section] = create_model(
    "BuiltIn", __base__=Section, **{name: (kind | None, None) for name, kind in SECTIONS.items()}
)  # type: ignore[call-overload]
"""The built-in rewards by name, with their options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One function of a reward.

    Example: RewardPart(label="numeric", spec="numeric", weight=1.0, options={"tolerance": 0.01}, settings=Numeric(...))
    """

    label: str
    """Its name in metrics."""
    spec: str
    weight: float
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    settings: RewardOptions | None = None
    """Of a built-in one."""


def checked_function(value: object) -> object:
    """What reward.function was given as; the options of built-in rewards are checked.

    Raises:
        ValueError: neither a name nor a mapping of names, an option that is not there, or two with one label.
        ValidationError: the value of an option is refused; its place is below the name.
    """
    if isinstance(value, str) and value:
        checked_function({value: {}})
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            "give a name, or names with weights, such as {numeric: 1, format: {weight: 0.2, tags: [think, answer]}}"
        )
    given = {str(name): _with_weight(str(name), one) for name, one in value.items()}
    known = {name: one for name, one in given.items() if name in SECTIONS}
    for name, one in known.items():
        for option in one.keys() - SECTIONS[name].model_fields.keys():
            fields = SECTIONS[name].model_fields
            hint = did_you_mean(option, fields) or f"there is {', '.join(fields)}"
            raise ValueError(f"{name}: no option {option!r}; {hint}")
    BuiltIn.model_validate(known)
    parts = parts_of(given)
    labels = [part.label for part in parts]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two parts are called {twice!r} in metrics; rename one of the functions or files")
    if not any(part.weight for part in parts):
        raise ValueError("every weight is 0, so every reward would be 0; give one of the parts a weight")
    return given


def parts_of(function: str | Mapping[str, Any] | None) -> tuple[RewardPart, ...]:
    """The parts of a checked reward.function, in their order; none where it is not given."""
    if function is None:
        return ()
    given = {function: {}} if isinstance(function, str) else function
    return tuple(_part(spec, dict(one)) for spec, one in given.items())


def _part(spec: str, given: dict[str, Any]) -> RewardPart:
    if section := SECTIONS.get(spec):
        settings = section.model_validate(given)
        options = settings.model_dump(exclude={"weight"})
        return RewardPart(label=spec, spec=spec, weight=settings.weight, options=options, settings=settings)
    weight = float(given.pop("weight", 1.0))
    return RewardPart(label=_label(spec), spec=spec, weight=weight, options=given)


def _label(spec: str) -> str:
    """`rules.style` of `path/to/rules.py:style` and of `package.rules:style`."""
    location, _, name = spec.rpartition(":")
    stem = location.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    return f"{stem}.{name}" if stem else name


def _with_weight(name: str, given: object) -> dict[str, Any]:
    """The options of an entry; a number alone is its weight."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = {"weight": given}
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{name}: give its weight, or its weight and options, found {given!r}")
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"{name}: weight {weight!r} is no finite number")
    return dict(given)
