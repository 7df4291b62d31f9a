"""Rows as named tensors and back, so that they can travel to another rank."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from configs.errors import kind_of
from learner.policy.prefixes import Prefixes
from learner.rows import MIN_TOKENS, Row

PREFIXES = "prefixes"
KINDS = {field.name: field.type for field in fields(Row)} | Prefixes.__annotations__
NUMBERS = {name for name, kind in KINDS.items() if kind in (int, "int")}
"""Fields that are numbers, and no tensors."""


def pack(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Every field of every row, in host memory, as `<number>.<field>`; its prefixes as `<number>.prefixes.<field>`.

    Fields that are None are left out.

    Raises:
        TypeError: a field is neither a tensor, nor a number, nor None.
    """
    packed = {}
    for number, row in enumerate(rows):
        named = {field.name: getattr(row, field.name) for field in fields(Row)}
        prefixes: Prefixes | None = named.pop(PREFIXES)
        named |= {f"{PREFIXES}.{name}": value for name, value in prefixes._asdict().items()} if prefixes else {}
        for name, value in named.items():
            tensor = torch.tensor(value) if isinstance(value, int) else value
            if torch.is_tensor(tensor):
                packed[f"{number}.{name}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            elif tensor is not None:
                raise TypeError(f"Row.{name} is {kind_of(tensor)}, which cannot travel to another rank")
    return packed


def unpack(packed: Mapping[str, torch.Tensor], num_rows: int) -> list[Row]:
    """The rows that `pack` was given."""
    found: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    shared: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for name, tensor in packed.items():
        number, _, field = name.partition(".")
        inner = field.removeprefix(f"{PREFIXES}.")
        (shared if inner != field else found)[int(number)][inner] = int(tensor) if inner in NUMBERS else tensor
    return [Row(**row, prefixes=Prefixes(**own) if own else None) for row, own in zip(found, shared, strict=True)]


def empty_row() -> Row:
    """A row without a trajectory, for a rank that is in a collective without any."""
    whole, real = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return Row(
        input_ids=torch.zeros((1, MIN_TOKENS), dtype=torch.int64),
        position_ids=torch.arange(MIN_TOKENS)[None],
        starts=torch.tensor([0, MIN_TOKENS], dtype=torch.int32),
        longest=MIN_TOKENS,
        kept=whole,
        targets=whole,
        behaviour_logprobs=real,
        advantages=real,
        weights=real,
        lags=real,
        lengths=whole,
        groups=whole,
        fresh=whole.bool(),
        values=real,
        returns=real,
    )
