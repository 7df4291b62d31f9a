"""A plugin of pytest (scripts/test.sh): what tests stay together when two workers share them, and which begin first."""

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ENGINES = "rollout_server"
"""These stay together, because they share one SGLang; everything else stays together by its file."""
LONGEST = (
    *("e2e/test_slurm.py", "mutants", "e2e/test_learner_nodes.py", "e2e/test_image.py"),
    *("e2e/test_whole_run.py", "e2e/test_campaign.py", "e2e/test_process_faults.py", "e2e/test_in_place.py"),
    *(ENGINES, "e2e/test_elastic.py", "e2e/test_namespaces.py", "e2e/test_planted_faults.py", "e2e"),
)
"""What begins first, so that all workers end at about the same time: whole runs mostly wait."""


def lane(file: str) -> str:
    """What the tests of a file, as its path below tests/, stay together with: the rest of the file, at least."""
    return ENGINES if file.startswith(f"{ENGINES}/") else file


def place(file: str) -> int:
    """Its lane's place in the order."""
    return next((n for n, first in enumerate(LONGEST) if lane(file).startswith(first)), len(LONGEST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path.relative_to(TESTS).as_posix()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whoever has nothing left to do takes the next lane."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid.split("::")[0].removeprefix("tests/"))

    return Lanes(config, log)
