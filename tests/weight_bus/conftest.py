"""A publisher for each test; a module with a `config` of its own gets one of that."""

from collections.abc import Iterator

import pytest

from configs.infrastructure import WeightBus
from tests.support.bus_receiver import CONFIG, learner
from weight_bus import Publisher


@pytest.fixture
def config() -> WeightBus:
    return CONFIG


@pytest.fixture
def publisher(config: WeightBus) -> Iterator[Publisher]:
    with learner(config) as made:
        yield made
