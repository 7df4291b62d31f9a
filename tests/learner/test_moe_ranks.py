"""Ranks that divide the experts among them compute what one rank does, gradients included."""

from pathlib import Path

from tests.learner import moe_ranks
from tests.support.ranks import two_ranks


def test_a_divided_layer_is_the_whole_one_also_where_a_rank_gets_no_token(tmp_path: Path) -> None:
    seen = two_ranks(Path(moe_ranks.__file__), tmp_path, lambda rank: {"WORLD_SIZE": "2"}, deadline_s=120)
    for case in seen[0]:
        assert max(max(rank[case].values()) for rank in seen) <= 1e-6, (case, [rank[case] for rank in seen])
