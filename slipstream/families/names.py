"""Exact maps between logical tensors, parameters of transformers and live tensors of SGLang. No torch.

Rules of live tensors. Fused modules: rows of their parts lie one after the other. Tensor ranks divide each part evenly;
what a word for a size does not divide is whole on each (norms, biases of o and down, routers). KV heads, where there
are fewer than ranks, are held by several. The vocabulary is padded to a multiple of 64, rows past its end are of no
logical tensor. A tied head is the embedding. Experts are divided first, by their number, then inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.families.record import DIVIDED, LAYERS, Family, Part, Weight
from slipstream.families.sizes import Sizes, heads_of

PADDING = 64
"""SGLang makes the rows of a vocabulary a multiple of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A scheduler rank of an engine."""

    rank: int = 0
    ranks: int = 1
    """Tensor-parallel (`placement.tensor_parallel`)."""
    expert_ranks: int = 1
    """Of these, that divide experts by number; they are consecutive blocks of ranks."""


def inside(family: Family, name: str, shape: tuple[int, ...]) -> list[Part]:
    """The logical tensors in a parameter of transformers; most are one, under its own name.

    Example: `model.layers.0.mlp.experts.down_proj` of 8 experts has 8.
    """
    prefix, own = _split(name)
    names = family.parameters.get(own, (own,))
    experts, one = (range(shape[0]), shape[1:]) if "*" in names[0] else ((None,), shape)
    size, zeros = (one[0] // len(names), *one[1:]), (0,) * len(one)
    return [
        Part(_of_expert(f"{prefix}{logical}", expert), size, zeros, size, name, _at(expert, i * size[0], zeros[1:]))
        for expert in experts
        for i, logical in enumerate(names)
    ]


def _of_expert(name: str, expert: int | None) -> str:
    return name if expert is None else name.replace("*", str(expert))


def _at(expert: int | None, row: int, rest: tuple[int, ...]) -> tuple[int, ...]:
    """A place in a holder, which has a dimension of experts in front if there are any."""
    return (row, *rest) if expert is None else (expert, row, *rest)


def _split(name: str) -> tuple[str, str]:
    """`model.layers.3.` and the rest, of a tensor of a layer."""
    if not name.startswith(LAYERS):
        return "", name
    number, _, own = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{number}.", own


def held(sizes: Sizes, place: Place) -> Iterator[Part]:
    """What of each logical tensor a scheduler rank of SGLang holds, and where in its live tensors.

    A logical tensor of parts that are divided apart, as a fused gate_up of a checkpoint, has a block for each.
    """
    live_names, taken = _live_names(sizes.family), dict[str, int]()
    for name, weight in sizes.weights():
        prefix, own = _split(name)
        live = prefix + live_names.get(own, own)
        rows, shape = _rows(sizes, weight, place), sizes.shape(weight)
        column, width = _share(sizes, weight.columns, weight, place) if weight.columns else (0, 0)
        columns = ((column,), (width,), (0,)) if weight.columns else ((), (), ())
        for expert, slot in _experts(sizes, weight, place):
            row = taken.get(live, 0)
            for begin, count in rows:
                if count:
                    start, size, at = (begin, *columns[0]), (count, *columns[1]), _at(slot, row, columns[2])
                    yield Part(_of_expert(name, expert), shape, start, size, live, at)
                row += count
        taken[live] = row  # parts of a fused tensor come in its order


def _live_names(family: Family) -> dict[str, str]:
    """By name in a layer; of modules for their weight and bias."""
    found: dict[str, str] = {}
    there = {weight.name for weight in (*family.attention, *family.mlp, *family.moe)}
    for live, names in family.live.items():
        for leaf in ("",) if "*" in names[0] else (".weight", ".bias"):
            if f"{names[0]}{leaf}" in there:  # an up without a gate is itself
                found |= {f"{name}{leaf}": f"{live}{leaf}" for name in names}
    return found


def _experts(sizes: Sizes, weight: Weight, place: Place) -> Iterator[tuple[int | None, int | None]]:
    """Experts of a tensor that the rank has, and their places there."""
    if "*" not in weight.name:
        yield None, None
        return
    mine = sizes.dims["experts"] // place.expert_ranks
    first = place.rank // (place.ranks // place.expert_ranks) * mine
    yield from ((first + slot, slot) for slot in range(mine))


def _rows(sizes: Sizes, weight: Weight, place: Place) -> list[tuple[int, int]]:
    """(first row, rows) that the rank has of each of the parts that are divided apart."""
    found, begin = [], 0
    for word in weight.rows.split("+"):
        first, count = _share(sizes, word, weight, place)
        found.append((begin + first, count))
        begin += sizes.dims[word]
    return found


def _share(sizes: Sizes, word: str, weight: Weight, place: Place) -> tuple[int, int]:
    """Where the rank's part of a size begins, and how much it is."""
    size, ranks, rank = sizes.dims[word], place.ranks, place.rank
    if word not in DIVIDED or weight.whole:
        return 0, size
    if word == "vocabulary":
        step = PADDING if -(-size // PADDING) * PADDING % ranks == 0 else PADDING * ranks
        each = -(-size // step) * step // ranks
        first = min(rank * each, size)
        return first, min(first + each, size) - first
    if word == "expert_inner":
        ranks //= place.expert_ranks
        rank %= ranks
    if word == "key" and (heads := heads_of(sizes.keys).key_value) < ranks:
        return rank // (ranks // heads) * (size // heads), size // heads
    return rank * (size // ranks), size // ranks
