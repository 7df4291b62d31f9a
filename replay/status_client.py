"""Asks a running replay for its Status: for views, readiness and examinations. No torch."""

import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal

from replay import messages as m
from replay.channel import Dealer, WireError, load_keys


@dataclass(frozen=True, slots=True)
class StatusReply:
    """Replay's view of the run."""

    run_name: str
    state: dict[str, Any]
    """Schema: docs/protocol.md."""


def ask_replay(
    address: str, keys: str | None, timeout_s: float, about: Literal["run", "clock", "config"] = "run"
) -> StatusReply | None:
    """Replay's Status, or None when it does not answer in time; `keys` is network.keys.

    About `config` its state is the run's configuration as YAML: {"config": text}.

    Example: ask_replay("tcp://10.0.0.1:5757", config.network.keys, 1.0).state["version"]
    """
    identity, until = f"node.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}", time.monotonic() + timeout_s
    with Dealer(address, identity, m.FROM_REPLAY, keys=load_keys(keys)) as dealer:
        dealer.send(m.StatusRequest(about=about))
        while (left := until - time.monotonic()) > 0:
            try:
                envelope = dealer.poll(left)
            except WireError:
                return None
            if envelope is not None and isinstance(envelope.message, m.Status):
                # the launcher makes the run id of name, pid and time
                return StatusReply(dealer.run_id.rsplit("-", 2)[0], envelope.message.state)
    return None
