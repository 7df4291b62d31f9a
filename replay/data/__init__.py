"""Prompts: the rows of a dataset, whatever its columns, and their order, pass by pass."""

from replay.data.dataset import BROKEN, Rows, load_rows, read_rows
from replay.data.rows import DataError, Row
from replay.data.source import Part, PromptSource, prompt_source, stream_seed

__all__ = [
    "BROKEN",
    "DataError",
    "Part",
    "PromptSource",
    "Row",
    "Rows",
    "load_rows",
    "prompt_source",
    "read_rows",
    "stream_seed",
]
