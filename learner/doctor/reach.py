"""Whether replay answers at an address, and how it fails to. No torch."""

import re
import socket
import time

from configs.schema import Config
from learner.launch.hosts.ready import ask_replay
from replay.channel import ChannelError

CONNECT_S = 3.0
REFUSAL_S = 20.0
"""A server of other keys says nothing: its twenty closed handshakes are a refusal (replay/channel/handshake.py)."""


def unreachable(address: str, config: Config, timeout_s: float = CONNECT_S) -> str | None:
    """Why the replay at tcp://host:port does not answer, with the class of the symptom; None when it does."""
    match = re.fullmatch(r"tcp://\[?([^\]]+)\]?:(\d+)", address)
    if match is None:
        return f"{address!r} is not of the form tcp://host:port"
    started = time.monotonic()
    try:
        socket.create_connection((match[1], int(match[2])), timeout=timeout_s).close()
    except TimeoutError:
        return f"nothing at {address} answers a connection within {timeout_s:g} s [silent]"
    except OSError as error:
        return f"{address} cannot be connected to: {error.strerror or error} [closed]"
    try:
        answer = ask_replay(config, address, REFUSAL_S)
    except ChannelError as error:
        return str(error)
    if answer is None:
        took = time.monotonic() - started
        return f"{address} takes connections and does not answer as replay does within {took:.0f} s [silent]"
    return None
