"""Routing of tokens on its way from engines to rows: which experts each pass has chosen. Pure, no torch.

A sample of P prompt and L answer tokens has a row of bytes (slipstream/families/experts.py) for each position but the
last, which no pass has read. The L rows of its answer stand by token: that of a token is of the pass that sampled it,
and so read the position before. The P - 1 rows before them are of its prompt; where samples share a prompt they are
there once, as its first sample has them.

    prompt [7, 8], answer [5, 2]:  prompt_routing of position 0;  routing of positions 1 and 2, for tokens 5 and 2

The sum of a sample is the CRC-32 of its prompt, that prompt's rows, its answer and the answer's rows: rows that are
missing, of another sample or shifted by a position do not have it.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.messages import Batch, Group, Int32, UInt8
from slipstream.families.experts import Experts

Rows = NDArray[Any]


def packed(prompts: Sequence[Int32], answers: Sequence[Int32], routing: Sequence[Rows | None]) -> dict[str, Any]:
    """Fields of Group: of prompts, one for each answer or one that all share, and answers with their passes' experts.

    None where the model has none.
    """
    found = [rows.reshape(len(rows), -1).view(np.uint8) for rows in routing if rows is not None]
    if len(found) < len(answers) or not found:
        return {}
    heads = [rows[: prompt.size - 1] for prompt, rows in zip(prompts, found, strict=False)]
    tails = [rows[len(rows) - answer.size :] for answer, rows in zip(answers, found, strict=True)]
    begun = [_sum(prompt, head.ravel()) for prompt, head in zip(prompts, heads, strict=True)]
    begun = begun if len(begun) == len(answers) else begun * len(answers)
    sums = [_sum(answer, tail.ravel(), first) for answer, tail, first in zip(answers, tails, begun, strict=True)]
    return {
        "prompt_routing": np.concatenate(heads).ravel(),
        "routing": np.concatenate(tails).ravel(),
        "routing_sums": np.array(sums, np.uint32).view(np.int32),
    }


def _sum(ids: Int32, rows: NDArray[np.uint8], before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(rows).data, zlib.crc32(np.ascontiguousarray(ids, "<i4").data, before))


def prompt_sizes(group: Group) -> Int32:
    """Rows of each of a group's prompts: of the one that all samples share, or of each sample's own."""
    return (group.prompt_lengths if group.prompt_lengths.size else np.array([group.prompt_ids.size], np.int32)) - 1


def problem_with_group(group: Group, experts: Experts | None) -> str | None:
    """What is wrong with the routing of a group for a model with these experts, or without any (None); else None."""
    if group.routing_place:
        return "its routing is said to be in the journal"
    sizes = {
        "routing": (group.routing, int(group.lengths.sum(dtype=np.int64))),
        "prompt_routing": (group.prompt_routing, int(prompt_sizes(group).sum(dtype=np.int64))),
    }
    for name, (data, tokens) in sizes.items():
        if data.size != (expected := 0 if experts is None else tokens * experts.token_bytes):
            return f"{name} of {data.size} bytes, {expected} are expected for {tokens} tokens"
        if experts is not None and data.size and (highest := int(data.view(experts.dtype).max())) >= experts.number:
            return f"{name} names expert {highest} of {experts.number}"
    samples = 0 if experts is None else group.lengths.size
    return f"{group.routing_sums.size} sums for {samples} samples" if group.routing_sums.size != samples else None


def kept(group: Group, samples: NDArray[np.bool_]) -> dict[str, Any]:
    """Fields of a group that keeps these of its samples alone."""
    if not group.routing.size:  # where the journal keeps it apart, what is left out is not there
        return {}
    fields: dict[str, Any] = {
        "routing": _by_token(group)[np.repeat(samples, group.lengths)].ravel(),
        "routing_sums": group.routing_sums[samples],
    }
    if group.prompt_lengths.size:
        rows = group.prompt_routing.reshape(-1, _width(group))
        fields["prompt_routing"] = rows[np.repeat(samples, prompt_sizes(group))].ravel()
    return fields


def _width(group: Group) -> int:
    return group.routing.size // group.token_ids.size


def _by_token(group: Group) -> UInt8:
    return group.routing.reshape(group.token_ids.size, -1)


def of_samples(samples: Sequence[tuple[Group, int, slice]]) -> dict[str, Any]:
    """Fields of Batch, of samples by their groups, numbers and tokens there; a shared prompt's rows are there once."""
    if not any(group.routing.size for group, _, _ in samples):
        return {}
    rows, heads, starts, sums = list[UInt8](), dict[tuple[int, int], tuple[int, UInt8]](), list[int](), list[int]()
    total = 0
    for group, number, tokens in samples:
        rows.append(_by_token(group)[tokens].ravel())
        of = number if group.prompt_lengths.size else 0
        if (id(group), of) not in heads:
            sizes, width = prompt_sizes(group), _width(group)
            last = int(sizes[: of + 1].sum(dtype=np.int64))
            own = group.prompt_routing[(last - int(sizes[of])) * width : last * width]
            heads[id(group), of] = (total, own)
            total += int(sizes[of])
        starts.append(heads[id(group), of][0])
        sums.append(int(group.routing_sums[number]))
    return {
        "routing": np.concatenate(rows),
        "prompt_routing": np.concatenate([own for _, own in heads.values()]),
        "routing_starts": np.array(starts, np.int32),
        "routing_sums": np.array(sums, np.int32),
    }


def problem_with_batch(batch: Batch, experts: Experts | None) -> str | None:
    """What is wrong with the routing of a rank's part, the sum of each sample included; else None."""
    if experts is None:
        return f"has {batch.routing.size} bytes of routing, and none is replayed here" if batch.routing.size else None
    width, count = experts.token_bytes, batch.lengths.size
    if batch.routing_starts.size != count or batch.routing_sums.size != count:
        return f"has routing of {batch.routing_starts.size} samples and {batch.routing_sums.size} sums, not of {count}"
    if batch.routing.size != (expected := int(batch.lengths.sum(dtype=np.int64)) * width):
        return f"has {batch.routing.size} bytes of routing, {expected} are expected"
    last = batch.routing_starts.astype(np.int64) + batch.prompt_lengths - 1
    if batch.routing_starts.min(initial=0) < 0 or last.max(initial=0) * width > batch.prompt_routing.size:
        return f"has {batch.prompt_routing.size} bytes of prompts' routing, of {int(last.max(initial=0))} positions"
    begun, sums = dict[tuple[int, bytes], int](), batch.routing_sums.view(np.uint32)
    for number, (prompt, answer, head, tail) in enumerate(_samples(batch, width)):
        key = (int(batch.routing_starts[number]), prompt.tobytes())
        if key not in begun:
            begun[key] = _sum(prompt, head)
        if _sum(answer, tail, begun[key]) != sums[number]:
            pass_, index = batch.group_ids[batch.all_groups[batch.trajectory[number]]]
            return (
                f"trajectory {batch.trajectory[number]}, of group ({pass_}, {index}): its routing is not that of its"
                " tokens: rows are missing, damaged or shifted [corrupt]"
            )
    return None


def _samples(batch: Batch, width: int) -> Iterator[tuple[Int32, Int32, UInt8, UInt8]]:
    """Of each sample: prompt, answer, and their rows."""
    at = token = 0
    numbers = zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), batch.routing_starts.tolist(), strict=True)
    for prompt, length, start in numbers:
        ids = batch.token_ids[at : at + prompt + length]
        head = batch.prompt_routing[start * width : (start + prompt - 1) * width]
        yield ids[:prompt], ids[prompt:], head, batch.routing[token * width : (token + length) * width]
        at, token = at + prompt + length, token + length


def positions_of(batch: Batch, experts: Experts) -> list[Rows]:
    """[P + L, layers, k] of each sample; the last position, which no pass has read, is as the one before it."""
    found = []
    for _, _, head, tail in _samples(batch, experts.token_bytes):
        rows = experts.rows(np.concatenate([head, tail]))
        found.append(np.concatenate([rows, rows[-1:]]))
    return found
