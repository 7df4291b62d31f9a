"""Configuration schema, loading and presets. Imports nothing of ours and no torch."""

from configs.base import ConfigError
from configs.loading import load
from configs.schema import Config

__all__ = ["Config", "ConfigError", "load"]
