"""What was published, what is served and what the log says of it. Shares no code with the bus."""

import logging
from collections.abc import Iterable, Mapping

import torch


def bytes_of(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """A copy of every tensor's bytes."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


class Observer:
    """Knows what was published and sees what is served. Shares nothing with the bus."""

    def __init__(self) -> None:
        self.truth: dict[int, dict[str, bytes]] = {}
        """The last versions."""
        self.served_corrupt: list[str] = []
        self.served: dict[str, tuple[int, bool]] = {}
        """By subscriber: the version that it was last told to serve, and whether it held that."""

    def publish(self, version: int, named: Mapping[str, torch.Tensor]) -> None:
        """Copy what is about to be published."""
        self.truth[version] = bytes_of(named)
        self.truth.pop(version - 2, None)

    def look(self, subscriber: str, version: int, live: Mapping[str, torch.Tensor]) -> None:
        """An engine is told to serve a version at this moment."""
        held, true = bytes_of(live), self.truth[version]
        wrong = [name for name in true if held.get(name) != true[name]]
        wrong += [name for name in held if name not in true]
        if wrong:
            self.served_corrupt.append(f"{subscriber!r} serves v{version} with a wrong {wrong[0]!r}")
        self.served[subscriber] = (version, not wrong)

    def holds(self, version: int, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the weights of a version, bit for bit."""
        return bytes_of(live) == self.truth[version]


class Heard(logging.Handler):
    """The warnings of the bus since the last `clear`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.lines.append(record.getMessage())

    def names(self, version: int, subscribers: Iterable[str]) -> bool:
        """Whether lines that say that something is corrupt name this version and each of these subscribers."""
        wrong = [line for line in self.lines if f"v{version}" in line and ("corrupt" in line or "change" in line)]
        return all(any(f"'{name}'" in line for line in wrong) for name in subscribers)
