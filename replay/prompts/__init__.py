"""Prompts: the rows of a dataset, whatever its columns, and their order, pass by pass."""

from replay.prompts.files import Rows, load_rows, read_rows
from replay.prompts.rows import DataError, Row
from replay.prompts.source import PromptSource, stream_seed

__all__ = ["DataError", "PromptSource", "Row", "Rows", "load_rows", "read_rows", "stream_seed"]
