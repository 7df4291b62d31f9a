"""The base of every configuration section, frozen and documented in place."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from configs.auto import BY_DEVICE, LEAVES
from configs.errors import ConfigError as ConfigError


class Section(BaseModel):
    """A block of the YAML file. Unknown keys are refused; values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator(*LEAVES, check_fields=False)
    @classmethod
    def _stands_alone(cls, value: str | bool, info: ValidationInfo) -> str | bool:
        """`auto` in a section outside a Config, where nothing is placed, is what works everywhere."""
        return BY_DEVICE[LEAVES[str(info.field_name)]][0] if value == "auto" else value
