"""Prompts: the rows of a dataset, whatever its columns, and their order, pass by pass."""

from replay.data.dataset import BROKEN, Reading, Rows, load_rows, read_rows
from replay.data.order import WeightedRows
from replay.data.rows import DataError, Row
from replay.data.source import PromptSource, evaluation_rows, prompt_source, stream_seed
