"""Whole runs: real sockets, real gloo, real FSDP2 ranks, and processes of their own for everything."""

import pytest

from tests.support.forking import Zygote
from tests.support.runs import Runs, trained_input, untrained_input


@pytest.fixture(scope="session")
def sort6(tmp_path_factory):
    """The quick start's input."""
    return trained_input(tmp_path_factory)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """The quick start's input without its training."""
    return untrained_input(tmp_path_factory.mktemp("untrained") / "data")


@pytest.fixture(scope="session")
def zygote():
    """Forks programs that have imported torch already."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def launch(tmp_path, untrained, zygote):
    """Start runs with small settings; whatever is left of them is ended afterwards."""
    runs = Runs(tmp_path, untrained, zygote)
    yield runs
    runs.close()
