"""What tests of the learner share."""

import pytest

from tests.learner.tiny_models import process_group, save_model


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A gloo process group of this process alone, for one module."""
    with process_group(tmp_path_factory.mktemp("group") / "store") as mesh:
        yield mesh


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """The folder of a tiny model, not to be changed."""
    return save_model(tmp_path_factory.mktemp("qwen3"))
