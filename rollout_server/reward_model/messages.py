"""Messages between rollout servers (DEALER) and a reward server (ROUTER).

Hello, Heartbeat and Refused are replay's.

A rollout server says Hello again and again; each is answered with a Heartbeat, or with Refused. A request has a number
that its sender gives once. It may be sent any number of times: the reward server scores it once and answers it from
then on with the same scores, for as long as it lives.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.channel import Message, registry
from replay.messages import Heartbeat, Hello, Refused

MAX_SAMPLES = 64
"""In one request."""
READY = "ready"
"""Activity in the Heartbeat of a reward server that has loaded its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Message):
    """Rollout server: score these answers."""

    number: int
    prompts: list[Any]
    """Of each answer: text, or chat messages of `role` and `content`."""
    completions: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(Message):
    """Reward server: the scores of a request, in its order."""

    number: int
    errors: list[str]
    """Why an answer has no score; empty where it has one."""
    scores: NDArray[np.float32]
    """NaN where there is an error."""


TO_REWARD = registry(Hello, Score)
FROM_REWARD = registry(Heartbeat, Refused, Scores)


def fingerprint(path: str | None) -> dict[str, str]:
    """Fingerprint in Hello, by which another run's reward server is recognised."""
    return {"reward.model.path": str(path)}
