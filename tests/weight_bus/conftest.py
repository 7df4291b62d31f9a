"""A publisher for each test; a module with a `config` of its own gets one of that."""

import pytest

from tests.support.bus_receiver import CONFIG, learner


@pytest.fixture
def config():
    return CONFIG


@pytest.fixture
def publisher(config):
    with learner(config) as made:
        yield made
