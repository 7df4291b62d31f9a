"""Two lanes, where scripts/test.sh asks for them: whole runs, which mostly wait, and everything else beside them."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LANES = {"chaos": "runs", "e2e": "runs", "rollout_server": "engines"}
"""What stays together, by its folder: one whole run at a time, and the engines' tests share one SGLang."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs begin first; the tests of any other file stay together, because they share what they set up."""
    for item in items:
        place = item.path.relative_to(TESTS)
        item.add_marker(pytest.mark.xdist_group(LANES.get(place.parts[0], str(place))))
    items.sort(key=lambda item: LANES.get(item.path.relative_to(TESTS).parts[0], "") != "runs")
