"""The layout: meshes of every kind hold, digest, gather, step and resume the same; boxes inside of boxes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from learner.layout import Box, Holding, Inner, Layout, as_it_is, box_of
from tests.learner import layout_ranks
from tests.learner.layout_ranks import CASES, RANKS, inside, logical, values
from tests.support.ranks import two_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw by case; it has compared digests and gathers with the whole itself."""
    folder = tmp_path_factory.mktemp("layout")
    return two_ranks(Path(layout_ranks.__file__), folder, lambda rank: {}, deadline_s=180, ranks=RANKS)


@pytest.mark.parametrize("name", CASES)
def test_norm_step_and_resume_are_the_same_on_every_mesh(seen: list[dict[str, Any]], name: str) -> None:
    found = [rank[name] for rank in seen if name in rank]
    whole, alone = values(0), seen[0]["shard_1"]
    norm = torch.stack([gradient.double().square().sum() for gradient in values(1).values()]).sum().sqrt()
    for rank in found:
        assert rank["norm"] == pytest.approx(float(norm), rel=1e-6)
        assert rank["resumed"] == seen[0][CASES[CASES.index(name) - 1]]["digest"]
        assert rank["digest"] == found[0]["digest"]
        assert ("norm: the" in rank["drifted"]) is (name in ("tensor", "replicate", "both"))
        for kind, tensors in rank["stepped"].items():
            for key, tensor in tensors.items():
                assert torch.allclose(torch.tensor(tensor), torch.tensor(alone["stepped"][kind][key]), atol=1e-6), key
    elements = sum(tensor.numel() for tensor in whole.values())
    assert sum(rank["sends"] for rank in found) == elements, "one of the copies stands for all"


@given(st.data())
def test_what_a_box_has_of_a_tensor_inside_is_what_the_tensor_has_there(data: st.DataObject) -> None:
    name, whole = data.draw(st.sampled_from(sorted(values(0).items())))
    ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in whole.shape]
    box = Box(tuple(first for first, _ in ends), tuple(last - first for first, last in ends))
    for one in inside(name, tuple(whole.shape)):
        held, view = one.held(box), one.view(whole[box.slices], box)
        assert one.shape == tuple(logical(values(0))[one.name].shape)
        assert view.shape == held.shape and torch.equal(view, logical(values(0))[one.name][held.slices])
        assert not view.numel() or view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def layout(held: dict[int, list[Box]], rank: int = 0, parts: Any = as_it_is) -> Layout:
    """Of parameters "0", "1", ... of shape (4, 2), by rank its boxes."""
    return Layout({r: [(str(n), (4, 2), box) for n, box in enumerate(boxes)] for r, boxes in held.items()}, rank, parts)


TOP, BOTTOM, ALL, NONE = Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((0, 0), (4, 2)), Box((0, 0), (0, 2))


def test_copies_share_what_is_to_be_sent() -> None:
    """Ranks may list different parameters, and need not be neighbours."""
    found = layout({0: [TOP, ALL], 2: [BOTTOM, NONE], 5: [TOP], 7: [BOTTOM]}, rank=5)
    assert found.holdings("0") == [Holding(TOP, (0, 5), 0), Holding(BOTTOM, (2, 7), 2)]
    assert found.holdings("1") == [Holding(ALL, (0,), 0)]
    assert found.ranks_beside("0") == (0, 5) and found.ranks_beside("1") == ()
    assert found.givers("0", {5: 0, 7: 1, 2: 2}) == [(TOP, [0]), (BOTTOM, [2, 1])]
    with pytest.raises(ValueError, match=r"lies on ranks \(2, 7\), none of which takes part"):
        found.givers("0", {0: 0, 5: 1})
    twice = layout({rank: [ALL] * 4 for rank in (3, 4)})
    assert [twice.holdings(name)[0].sender for name in twice.names] == [3, 4, 3, 4]


@pytest.mark.parametrize(
    ("held", "parts", "said"),
    [
        ({0: [TOP], 1: [NONE]}, as_it_is, "0: ranks hold 4 of its 8 elements"),
        ({0: [TOP], 1: [ALL]}, as_it_is, "0: ranks hold 12 of its 8 elements"),
        ({0: [TOP], 1: [BOTTOM], 2: [BOTTOM]}, as_it_is, "0: some of it lies on 1 ranks, some on 2"),
        ({0: [ALL]}, lambda name, shape: [Inner("a", TOP, 2)], "0: the tensors inside of it have 4 of its 8"),
    ],
)
def test_a_layout_that_does_not_make_up_a_parameter_is_refused(held: Any, parts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layout(held, parts=parts)


def test_a_parameter_that_lies_as_none_does_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="placement P"):
        box_of(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    short = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1))
    with pytest.raises(ValueError, match=r"\(3, 2\) of a parameter of \(4, 2\) are here, expected \(4, 2\)"):
        box_of(short)
