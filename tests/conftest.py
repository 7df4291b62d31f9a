"""What each test leaves as it found it, and what holds for all of them."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from slipstream.runtime.hang import registry
from tests.support.waiting import until

# a busy machine takes longer for one example than any bound that would say something
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_run_of_an_earlier_test() -> Iterator[None]:
    """A launcher that a test calls in this process notes itself; later messages would name that run's reports."""
    yield
    registry.own = None


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    """A launcher that ends ignores them, and so would all programs that later tests start."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_of_this_file() -> None:
    """Looking for garbage among all that was imported and made before is a tenth of the tests' time otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """This process as a member of a run: the second line of its only hang report, which says what was waited for."""
    run_dir = tmp_path / "the-run"
    (run_dir / "logs").mkdir(parents=True)
    made = registry.RegisteredProcess(name="me", pid=os.getpid(), host="here", started=0, replay=None, keys=None)
    monkeypatch.setattr(registry, "own", registry.Own(run_dir, made))

    def second_line() -> str:
        (path,) = run_dir.glob("hang-*.txt")
        until(lambda: "LAST LINES" in path.read_text(), "the report is whole")
        return path.read_text().splitlines()[1]

    return second_line
