"""Prompts: the rows of a dataset, whatever its columns, and their order, pass by pass."""

from replay.prompts.rows import DataError, Row
from replay.prompts.source import PromptSource, load_rows, read_rows

__all__ = ["DataError", "PromptSource", "Row", "load_rows", "read_rows"]
