"""What each test leaves as it found it, and what holds for all of them."""

import gc
from collections.abc import Iterator

import hypothesis
import pytest

from replay.hang import registry

# a busy machine takes longer for one example than any bound that would say something
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")


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
