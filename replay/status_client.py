"""Asks a running replay for its Status: for views, readiness and examinations. No torch."""

import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from replay import messages as m
from replay.channel import Dealer, WireError, load_keys


@dataclass(frozen=True, slots=True)
class Answer:
    """Replay's view of the run."""

    run_name: str
    state: dict[str, Any]
    """Schema: docs/protocol.md."""


def ask_replay(config: Config, address: str, timeout_s: float) -> Answer | None:
    """Replay's Status, or None when it does not answer in time.

    Example: ask_replay(config, "tcp://10.0.0.1:5757", 1.0).state["version"]
    """
    identity = f"node.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    with Dealer(address, identity, m.FROM_REPLAY, keys=load_keys(config.network.keys)) as dealer:
        dealer.send(m.StatusRequest())
        try:
            envelope = dealer.poll(timeout_s)
        except WireError:
            return None
        if envelope is None or not isinstance(envelope.message, m.Status):
            return None
        # the launcher makes the run id of name, pid and time
        return Answer(dealer.run_id.rsplit("-", 2)[0], envelope.message.state)
