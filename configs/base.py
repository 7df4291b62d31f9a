"""The base of every configuration section, frozen and documented in place."""

import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from configs.auto import BY_DEVICE, LEAVES
from configs.errors import ConfigError as ConfigError

T = TypeVar("T")


class Scope(Enum):
    """How peers of a run compare a key at Hello; a key without one has the same value in every process."""

    PROCESS = "each process may have a value of its own"
    PATH = "each host may have a path of its own; whether there is one agrees"
    SECRET = "values agree and are never shown"


Own = Annotated[T, Scope.PROCESS]
OwnPath = Annotated[T, Scope.PATH]
Secret = Annotated[T, Scope.SECRET]


def weights_of(value: str) -> str:
    """The folder of weights that a run or one of its checkpoints holds; another folder itself. Raises ValueError."""
    folder = Path(value)
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        whole = [path.parent for path in folder.glob("checkpoints/step_*/COMPLETE") if path.with_name("hf").is_dir()]
        steps = {int(path.name[5:]): path for path in whole if path.name[5:].isdigit()}
        if not steps:
            raise ValueError("no checkpoint of this run is complete; let it write one, or name a model folder")
        folder = steps[max(steps)]
    elif folder.is_symlink():
        folder = folder.parent / folder.readlink()  # `best` may be another one tomorrow
    is_checkpoint = (folder / "hf").is_dir() and not (folder / "config.json").exists()
    return str(folder / "hf") if is_checkpoint else value


ModelFolder = Annotated[str, AfterValidator(weights_of)]
"""Of a key that names a model in the ways of model.path."""


def _no_float16(value: object) -> object:
    if value in ("float16", "fp16", "half"):
        raise ValueError("float16 is not offered: its range needs a scale of the loss; take bfloat16")
    return value


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(_no_float16)]
"""Of weights and of what is computed with them, on both ends."""

ENDLESS = ("growth_window_s",)
"""Keys in seconds that nothing waits for, so they may be infinite."""


class Section(BaseModel):
    """A block of the YAML file. Unknown keys are refused; values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator(*LEAVES, check_fields=False)
    @classmethod
    def _stands_alone(cls, value: str | bool, info: ValidationInfo) -> str | bool:
        """`auto` in a section outside a Config, where nothing is placed, is what works everywhere."""
        return BY_DEVICE[LEAVES[str(info.field_name)]][0] if value == "auto" else value

    @field_validator("*")
    @classmethod
    def _can_be_waited_for(cls, value: Any, info: ValidationInfo) -> Any:
        """Clocks of torch and of sockets take no infinity, and say so in the middle of a start."""
        name = str(info.field_name)
        if isinstance(value, float) and math.isinf(value) and name.endswith("_s") and name not in ENDLESS:
            raise ValueError("is infinite, and no clock counts so far; for no limit give many seconds, such as 1e7")
        return value
