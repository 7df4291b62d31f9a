"""Moments of an update at which a process of the bus can be held, so that a fault meets it exactly there.

A gate is a folder of two files. `aim` names a moment and how long to wait there at most; whoever reaches that moment
writes `at`, and goes on when `aim` is gone. `spoil` asks a subscriber to flip a bit of what it receives next.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, missing in the stubs

from replay.channel import Message, WireError
from weight_bus import intake, messages, subscriber
from weight_bus.control import Dealer
from weight_bus.manifest import Manifest
from weight_bus.staging import HOST, Staging
from weight_bus.transports import Formation, Transport, make_transport
from weight_bus.transports.meeting import HERE

LOOK_S = 0.002
BEFORE_SENDING: dict[type[Message], str] = {messages.Join: "before Join"}
AFTER_SENDING: dict[type[Message], str] = {
    messages.Join: "joining",
    messages.EpochReady: "EpochReady",
    messages.Staged: "Staged",
    messages.Applied: "Applied",
}
RECEIVED: dict[type[Message], str] = {
    messages.Epoch: "Epoch",
    messages.Begin: "Begin",
    messages.Commit: "Commit",
}


class Gate:
    """The end in the process that is held."""

    def __init__(self, folder: Path) -> None:
        self.aim, self.at, self.spoil = folder / "aim", folder / "at", folder / "spoil"

    def reach(self, moment: str) -> None:
        """This process is at a moment: wait, if somebody has aimed at it."""
        try:
            limit, aimed = self.aim.read_text(encoding="utf-8").split(" ", 1)
        except (FileNotFoundError, ValueError):  # not there, or not yet written
            return
        if aimed != moment:
            return
        self.at.touch()
        deadline = time.monotonic() + float(limit)
        while self.aim.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


class Hand:
    """The harness's end of a gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gate = Gate(folder)

    def aim(self, moment: str, limit_s: float) -> None:
        """Hold the process when it reaches this moment the next time, at most for so long."""
        self._gate.at.unlink(missing_ok=True)
        new = self._gate.aim.with_suffix(".new")
        new.write_text(f"{limit_s} {moment}", encoding="utf-8")
        new.rename(self._gate.aim)

    def spoil(self) -> None:
        """Flip a bit of the next update, in its middle bucket."""
        self._gate.spoil.touch()

    @property
    def arrived(self) -> bool:
        """Whether the process is, or was, at the moment."""
        return self._gate.at.exists()

    @property
    def spoiled(self) -> bool:
        """Whether the bit has been flipped."""
        return not self._gate.spoil.exists()

    def release(self) -> None:
        """Let it go; nothing is aimed at any more."""
        self._gate.aim.unlink(missing_ok=True)


def install(gate: Gate) -> None:
    """Put the gate into the subscriber of this process, which is made afterwards."""
    pieces = [0]  # of the update that is received

    class GatedDealer(Dealer):
        """The control plane."""

        def send(self, message: Message) -> bool:
            """See `Dealer.send`."""
            if type(message) in BEFORE_SENDING:
                gate.reach(BEFORE_SENDING[type(message)])
            sent = super().send(message)
            if type(message) in AFTER_SENDING:
                gate.reach(AFTER_SENDING[type(message)])
            return sent

        def poll(self, timeout_s: float) -> Message | WireError | None:
            """See `Dealer.poll`."""
            message = super().poll(timeout_s)
            if type(message) in RECEIVED:
                gate.reach(RECEIVED[type(message)])  # type: ignore[index]
            return message

    class GatedStaging(Staging):
        """The staging buffers."""

        def prepare(self, manifest: Manifest, device: torch.device = HOST) -> None:
            """See `Staging.prepare`."""
            super().prepare(manifest, device)
            pieces[0] = len(self.buckets)

        def corrupt(self) -> list[str]:
            """See `Staging.corrupt`."""
            gate.reach("verifying")
            return super().corrupt()

    class GatedIntake(intake.Intake):
        """What applies a staged update."""

        def apply(self, version: int, load: intake.Load) -> Mapping[str, int]:
            """See `Intake.apply`."""

            def held(number: int, named: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
                return load(number, _halfway(gate, list(named)))

            live = super().apply(version, held)
            gate.reach("proving")
            return live

    def gated(*arguments: Any) -> Any:
        return GatedTransport(make_transport(*arguments), gate, pieces)

    for module, name, value in (
        (subscriber, "Dealer", GatedDealer),
        (subscriber, "Intake", GatedIntake),
        (subscriber, "make_transport", gated),
        (intake, "Staging", GatedStaging),
    ):
        setattr(module, name, value)


class GatedTransport:
    """The data plane."""

    def __init__(self, inner: Transport, gate: Gate, pieces: list[int]) -> None:
        self._inner, self._gate, self._pieces = inner, gate, pieces
        meeting = getattr(inner, "_meeting", None)
        if meeting is not None:
            find = meeting.at

            def at(formation: Formation) -> "GatedStore":
                self._store = GatedStore(find(formation), gate)  # kept, for the group keeps only its C++ half
                return self._store

            meeting.at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `Transport.broadcast`."""
        moments = {0: "first bucket", self._pieces[0] - 1: "last bucket", self._pieces[0] // 2: "middle bucket"}
        if index in moments:
            self._gate.reach(moments[index])
        self._inner.broadcast(bucket, index)
        if moments.get(index) == "middle bucket" and self._gate.spoil.exists():
            bucket[0] ^= 1
            self._gate.spoil.unlink()


class GatedStore(Store):
    """Where the members of a group meet: the gate is between telling one's own address and connecting to the others."""

    def __init__(self, inner: Store, gate: Gate) -> None:
        super().__init__()
        self._inner, self._gate = inner, gate

    def set(self, key: str, value: Any) -> None:
        """See `Store.set`."""
        self._inner.set(key, value)
        if not key.startswith(HERE):
            self._gate.reach("forming")

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._inner.get(key)

    def wait(self, *arguments: Any) -> None:
        """See `Store.wait`."""
        self._inner.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        """See `Store.check`."""
        return self._inner.check(keys)

    def add(self, key: str, number: int) -> int:
        """See `Store.add`."""
        return self._inner.add(key, number)

    def has_extended_api(self) -> bool:
        """So that nothing else is called."""
        return False


def _halfway(gate: Gate, named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one by one; half of them are with the engine at the gate."""
    for number, pair in enumerate(named):
        if number == len(named) // 2:
            gate.reach("applying")
        yield pair
