"""What tests of the learner share."""

from collections.abc import Iterator

import pytest
from one_rank import process_group
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A gloo process group of this process alone, for one module."""
    with process_group(tmp_path_factory.mktemp("group") / "store") as mesh:
        yield mesh
