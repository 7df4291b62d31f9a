"""Rows as named tensors and back, so that they can travel to another rank."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from learner.rows import MIN_TOKENS, Row


def pack(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Every field of every row, in host memory, as `<number>.<field>`.

    Fields that are None are left out.

    Raises:
        TypeError: a field is neither a tensor, nor a number, nor None.
    """
    packed = {}
    for number, row in enumerate(rows):
        for field in fields(Row):
            value = getattr(row, field.name)
            if isinstance(value, int):
                value = torch.tensor(value)
            if torch.is_tensor(value):
                packed[f"{number}.{field.name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            elif value is not None:
                raise TypeError(f"Row.{field.name} is a {type(value).__name__}, which cannot travel to another rank")
    return packed


def unpack(packed: Mapping[str, torch.Tensor], num_rows: int) -> list[Row]:
    """The rows that `pack` was given."""
    found: list[dict[str, torch.Tensor | int]] = [{} for _ in range(num_rows)]
    numbers = {field.name for field in fields(Row) if field.type in (int, "int")}
    for name, tensor in packed.items():
        number, _, field_name = name.partition(".")
        found[int(number)][field_name] = int(tensor) if field_name in numbers else tensor
    return [Row(**values) for values in found]  # type: ignore[arg-type]


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
        values=real,
        returns=real,
    )
