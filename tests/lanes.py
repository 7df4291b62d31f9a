"""A plugin of pytest (scripts/test.sh): two lanes, whole runs, which mostly wait, and everything else beside them."""

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
LANES = {"e2e": "runs", "rollout_server": "engines"}
"""What stays together, by its folder: one whole run at a time, and the engines' tests share one SGLang."""


def lane(file: str) -> str:
    """What the tests of a file, as its path below tests/, stay together with: the rest of the file, at least."""
    return LANES.get(file.split("/")[0], file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The largest begin first, so that both lanes end at about the same time."""
    first = [*LANES.values()]
    names = {item: lane(item.path.relative_to(TESTS).as_posix()) for item in items}
    items.sort(key=lambda item: first.index(names[item]) if names[item] in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever has nothing left to do takes the next lane."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid.split("::")[0].removeprefix("tests/"))

    return Lanes(config, log)
