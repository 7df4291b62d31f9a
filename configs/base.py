"""The base of every configuration section: frozen, documented in place, refusing unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A block of the YAML file. Unknown keys are refused; values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
