"""What each test leaves as it found it."""

import gc
from collections.abc import Iterator

import pytest

from replay.hang import registry


@pytest.fixture(autouse=True)
def _no_run_of_an_earlier_test() -> Iterator[None]:
    """A launcher that a test calls in this process notes itself; later messages would name that run's reports."""
    yield
    registry.own = None


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_of_this_file() -> None:
    """Looking for garbage among all that was imported and made before is a tenth of the tests' time otherwise."""
    gc.collect()
    gc.freeze()
