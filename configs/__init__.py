"""Configuration schema, loading and presets. Imports nothing of ours and no torch."""

from configs.loading import ConfigError, load
from configs.schema import Config

__all__ = ["Config", "ConfigError", "load"]
