"""Routing from a group to rows: each position keeps its experts, and what is not that of its tokens stops the batch."""

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from learner.rows import BatchError, check, lay_out
from replay import messages as m
from replay import routing
from replay.batches.build import assign, build, trained
from replay.batches.sharing import Members
from replay.channel import decode, encode
from replay.state.answers import kept
from slipstream.families.experts import Experts, experts_of
from tests.replay.simulation.samples import make_group

STEP, SIZE = 1, 4
QWEN3_30B = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32}
FEW, MANY = Experts(2, 2, 6), Experts(1, 3, 300)


def group_of(experts: Experts, index: int, *, own_prompts: bool, left_out: int | None = None) -> m.Group:
    """Answers whose experts at a position follow from (group, sample, position); a shared prompt's are sample 0's."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, 6, SIZE).tolist()
    sizes = rng.integers(1, 7, SIZE if own_prompts else 1).tolist()
    prompts = [rng.integers(0, 50, size).astype(np.int32) for size in sizes]
    answers = [rng.integers(0, 50, length).astype(np.int32) for length in lengths]
    of_answers = prompts if own_prompts else prompts * SIZE
    found: list[Any] = [
        rows(experts, index, number, prompt.size + answer.size - 1)
        for number, (prompt, answer) in enumerate(zip(of_answers, answers, strict=True))
    ]
    fields: dict[str, Any] = {"prompt_ids": np.concatenate(prompts), "token_ids": np.concatenate(answers)}
    if own_prompts:
        fields["prompt_lengths"] = np.array(sizes, np.int32)
    if left_out is not None:
        fields |= {"errors": ["reward_error" if i == left_out else "" for i in range(SIZE)]}
        fields["left_out"] = np.array([i == left_out for i in range(SIZE)], np.uint8)
    return make_group(lengths, index=index, **fields, **routing.packed(prompts, answers, found))


def rows(experts: Experts, index: int, sample: int, count: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng([index, sample]).integers(0, experts.number, (count, *experts.shape))
    return drawn.astype(experts.dtype)


def parts_of(groups: list[m.Group], ranks: int) -> list[m.Batch]:
    members = Members.of(groups, trained(groups, flat=True))
    placed = assign(members.prompts + members.answers, members.trained, ranks, 40)
    built = build(STEP, groups, placed, num_ranks=ranks, stats={})
    sent = [decode([bytes(frame) for frame in encode(part, "r", 1)], m.FROM_REPLAY).message for part in built]
    return [part for part in sent if isinstance(part, m.Batch)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("experts", [FEW, MANY])
def test_every_position_of_a_row_has_the_experts_of_its_sample(experts: Experts, share: bool) -> None:
    given = [group_of(experts, i, own_prompts=i == 1, left_out=2 if i else None) for i in range(3)]
    assert all(routing.problem_with_group(group, experts) is None for group in given)
    numbers = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]
    for part in parts_of([kept(group) for group in given], 2):
        check(part, async_lag=2, vocab_size=64, experts=experts)
        flat = np.ones(part.all_rewards.size, np.float32)
        found = routing.positions_of(part, experts)
        names = [(group, sample) for group, samples in enumerate(numbers) for sample in samples]
        for row in lay_out(part, flat, flat, share, routing=found):
            if not len(row.trajectories):
                continue
            assert row.routing is not None and row.routing.shape == (row.input_ids.shape[1], *experts.shape)
            for n, trajectory in enumerate(row.trajectories.tolist()):
                index, sample = names[trajectory]
                prompt = found[np.flatnonzero(part.trajectory == trajectory)[0]].shape[0] - int(row.lengths[n])
                own = rows(experts, index, sample, prompt + int(row.lengths[n]) - 1)
                if index != 1:  # sample 0's prompt is that of all
                    own[: prompt - 1] = rows(experts, index, 0, prompt - 1 + 5)[: prompt - 1]
                at = row.kept[int(row.lengths[:n].sum()) :][: int(row.lengths[n])]
                skip = int(share and index != 1)  # a shared prompt's last token has those of one sample
                assert np.array_equal(row.routing[at][skip:].numpy(), own[prompt - 1 :][skip:])


def test_what_a_token_costs() -> None:
    experts = experts_of(QWEN3_30B)
    assert experts is not None and experts.token_bytes == 384 and experts == Experts.of_told(experts.told())
    assert experts_of({"model_type": "qwen3", "num_hidden_layers": 2}) is None
    dense = make_group([2, 3])
    described = msgpack.unpackb(encode(dense, "r", 1)[0])["arrays"]
    assert not any("routing" in name for name, _, _ in described)


WIDTH = FEW.token_bytes
SPOILED = {
    "shifted": lambda part: {"routing": np.roll(part.routing, WIDTH)},
    "shifted within the prompt": lambda part: {"prompt_routing": np.roll(part.prompt_routing, WIDTH)},
    "of another sample": lambda part: {"routing_starts": np.roll(part.routing_starts, 1)},
    "missing": lambda part: {"routing": part.routing[:-WIDTH]},
    "missing whole": lambda part: dict.fromkeys(("routing", "prompt_routing"), part.routing[:0]),
    "missing sums": lambda part: {"routing_sums": part.routing_sums[:-1]},
    "missing prompts": lambda part: {"prompt_routing": part.prompt_routing[:-WIDTH]},
    "one bit": lambda part: {"routing": part.routing ^ np.eye(1, part.routing.size, dtype=np.uint8)[0]},
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_routing_that_is_not_that_of_its_tokens_stops_the_batch(spoil: Any) -> None:
    (part,) = parts_of([group_of(FEW, 7, own_prompts=True), group_of(FEW, 8, own_prompts=False)], 1)
    check(part, async_lag=2, vocab_size=64, experts=FEW)
    with pytest.raises(BatchError, match=r"batch 1, rank 0: .*routing"):
        check(replace(part, **spoil(part)), async_lag=2, vocab_size=64, experts=FEW)
    with pytest.raises(BatchError, match="none is replayed here"):
        check(part, async_lag=2, vocab_size=64)


GROUPS = {
    "routing of": {"routing": np.zeros(3, np.uint8)},
    "prompt_routing of": {"prompt_routing": np.zeros(3, np.uint8)},
    "names expert 6 of 6": {"routing": np.full(20 * WIDTH, 6, np.uint8)},
    "1 sums for": {"routing_sums": np.zeros(1, np.int32)},
}


@pytest.mark.parametrize("said", GROUPS)
def test_a_group_whose_routing_does_not_fit_is_refused(said: str) -> None:
    group = group_of(FEW, 7, own_prompts=False)
    size = int(group.lengths.sum())
    changed = {name: data[: size * WIDTH] for name, data in GROUPS[said].items()}
    assert said in (routing.problem_with_group(replace(group, **changed), FEW) or "")
    assert routing.problem_with_group(group, None) is not None
