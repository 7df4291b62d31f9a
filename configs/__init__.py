"""Configuration schema, loading and presets. Imports nothing of ours and no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.errors import ConfigError
    from configs.loading import load
    from configs.schema import Config

__all__ = ["Config", "ConfigError", "load"]


def __getattr__(name: str) -> Any:
    """Import the schema when it is asked for: the processes of rewards and sandboxes need configs.errors alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from configs import loading

    return getattr(loading, name)
