"""Trajectories over ranks and microbatches: complete, balanced, bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replay.desks.batches import assign


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(100, 400),
)
def test_every_trajectory_has_one_place_and_no_microbatch_is_too_large(lengths, ranks, max_tokens):
    lengths = np.array((lengths * ranks)[: len(lengths) // ranks * ranks or ranks], dtype=np.int64)
    if len(lengths) % ranks:
        lengths = lengths[: len(lengths) // ranks * ranks]
    made = assign(lengths, ranks, max_tokens)
    assert np.bincount(made.rank, minlength=ranks).tolist() == [len(lengths) // ranks] * ranks
    assert made.microbatch.max() < made.num_microbatches
    for rank in range(ranks):
        for microbatch in range(made.num_microbatches):
            mine = lengths[(made.rank == rank) & (made.microbatch == microbatch)]
            assert len(mine) * mine.max(initial=0) <= max_tokens
