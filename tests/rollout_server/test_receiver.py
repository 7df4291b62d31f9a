"""A receiver and the subscriber's end of it, over a socket and a real gloo group of two, without an engine."""

import gc
import itertools
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.infrastructure import WeightBus
from replay.channel import WireError, decode, encode, registry
from rollout_server.engines.sglang.update.orders import CUDA_HANDLE, in_bytes, in_words
from rollout_server.engines.sglang.update.receiver import Handles, Receiver
from tests.support import bus_receiver
from tests.support.bus_receiver import HOST, Weights, digests
from weight_bus import TransportError
from weight_bus.messages import Begin, described, digest_array
from weight_bus.packing import Packer
from weight_bus.remote import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Done,
    Forget,
    Hosting,
    ReceiverConnection,
    RemoteIntake,
    RemoteUpdate,
    Taken,
)
from weight_bus.staging import view_of
from weight_bus.transports import Formation, TransportFactory, make_transport
from weight_bus.transports.base import group_prefix
from weight_bus.transports.gloo import GlooCollective

CONFIG = WeightBus(bucket_bytes=20_000, collective_timeout_s=1.0, heartbeat_s=0.25, deadline_s=8.0)
RUN = "receiver-test"
CPU = torch.device("cpu")
EPOCHS = itertools.count(1)

weights = partial(bus_receiver.weights, rows=30)
LAYOUT = described(Packer(CONFIG.bucket_bytes).pack(weights(1).items(), 0)[0], CONFIG.bucket_bytes)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: one of a socket has a hundred characters."""
    made = Path(tempfile.mkdtemp(prefix="slipstream-test-"))
    yield made
    shutil.rmtree(made)


class Pair:
    """A receiver thread of this process, and the link to it."""

    def __init__(
        self, folder: Path, factory: TransportFactory = make_transport, *, slack_s: float = 30.0, after: Any = None
    ) -> None:
        path = folder / "receiver.sock"
        path.unlink(missing_ok=True)
        order = {"socket": str(path), "config": CONFIG.model_dump(), "host": HOST, "export": False}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            self.receiver = Receiver(order, CPU, after, factory)
            self.receiver.start()
            self.link = ReceiverConnection.accept(listener, 5.0)
        self._slack_s = slack_s
        self.live: Weights = {}
        self.intake = self.another()

    def another(self, run_id: str = RUN) -> RemoteIntake:
        """A later subscriber's end."""
        intake = RemoteIntake(lambda: [self.link], CONFIG, run_id, self.load, slack_s=self._slack_s)
        intake.learn(LAYOUT)
        return intake

    def load(self, version: int, update: RemoteUpdate) -> Mapping[str, int]:
        """As an engine would, from the receiver's memory."""
        buckets = [self.receiver.bucket(number, one["take"]) for number, one in enumerate(update.memory)]
        self.live = {entry.name: view_of(buckets, entry).clone() for entry in update.entries}
        return digests(self.live)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self.receiver.join(10)
        assert not self.receiver.is_alive(), "it ends when the server hangs up"


class Sender(threading.Thread):
    """Rank 0: sends one version in a group of its own, up to a bucket before which it is lost."""

    def __init__(
        self, version: int, lost_before: int = 1000, base: str = "", run: str = RUN, flip: bool = False
    ) -> None:
        super().__init__(daemon=True)
        named = weights(version)
        layout, self._buckets = Packer(CONFIG.bucket_bytes).pack(named.items(), 0)
        manifest = layout.with_digests(digests(named))
        change: dict[str, Any] = {}
        if base:
            self._buckets = [torch.zeros(100, dtype=torch.uint8)]
            change = {"base": base, "wire_bytes": 100, "change_bytes": 100}
        self._buckets[0][5] ^= flip
        self._lost_before, self._run = lost_before, run
        self._transport = GlooCollective(CONFIG, HOST)
        self._epoch = next(EPOCHS)
        self.begin = Begin(
            epoch=self._epoch,
            version=version,
            incarnation=0,
            evaluate=False,
            ranks={"s": 1},
            size=2,
            endpoint=self._transport.serve(),
            bucket_bytes=CONFIG.bucket_bytes,
            layout=layout.id,
            digests=digest_array(manifest),
            digest=manifest.digest,
            **change,
        )
        if lost_before:
            self.start()

    def run(self) -> None:
        """Form, broadcast, leave. What goes wrong is what the other end is tested for."""
        prefix = group_prefix(self._run, 0, self._epoch)
        formation = Formation(epoch=self._epoch, rank=0, size=2, endpoint=self.begin.endpoint, prefix=prefix)
        with suppress(TransportError):
            self._transport.form(formation)
            for index, bucket in enumerate(self._buckets[: self._lost_before]):
                self._transport.broadcast(bucket, index)
        self._transport.leave()


def lost(said: str) -> Any:
    return pytest.raises(TransportError, match=said)


def check_next(pair: Pair, intake: RemoteIntake, version: int) -> None:
    """A version goes through."""
    begin = Sender(version).begin
    assert intake.take(begin) == [] and set(intake.seconds) >= {"wire", "verify"}
    assert not intake.manifest.differences(intake.apply(version, lambda *_: {})) and digests(pair.live) == digests(
        weights(version)
    )


def test_versions_are_staged_in_the_receiver_in_the_same_buffers(folder: Path) -> None:
    with Pair(folder) as pair:
        assert pair.intake.facts == GlooCollective(CONFIG, HOST).facts()
        check_next(pair, pair.intake, 1)
        first = pair.receiver.bucket(0, 1)
        with pytest.raises(ValueError, match="update 2 is not staged in this scheduler, which is at 1"):
            pair.receiver.bucket(0, 2)
        pair.intake.forget()
        check_next(pair, pair.intake, 2)
        pair.intake.close()
        later = pair.another()
        check_next(pair, later, 3)
        assert pair.receiver.bucket(0, 3) is first, "another subscriber of the run"
        with pytest.raises(ValueError, match="update 1 is not staged in this scheduler, which is at 3"):
            pair.receiver.bucket(0, 1)
        later.close()
        assert pair.another("other").take(Sender(4, run="other").begin) == []
        assert pair.receiver.bucket(0, 4) is first, "the engine's other ranks have it mapped"


def test_what_is_wrong_with_a_version_is_the_same_error_here_and_the_next_one_arrives(folder: Path) -> None:
    with Pair(folder) as pair:
        check_next(pair, pair.intake, 1)
        with lost(r"broadcast of bucket 3 failed: .* \[(closed|silent)\]"):
            pair.intake.take(Sender(2, lost_before=2).begin)
        pair.intake.forget()
        away = Sender(2, lost_before=0)
        with lost(rf"epoch {away.begin.epoch} .* rank 0 did not come in 1.0 s \[silent\]"):
            pair.intake.take(away.begin)
        pair.intake.forget()
        with pytest.raises(WireError, match="v2 comes as a change of other, and nothing is staged"):
            pair.intake.take(Sender(2, base="other").begin)
        pair.intake.forget()
        flipped = Sender(2, flip=True)
        assert pair.intake.take(flipped.begin) == ["layers.0.weight"]
        check_next(pair, pair.intake, 3)


class Stuck(GlooCollective):
    """Stands still before the second bucket until it is let go, or fails there."""

    def __init__(self, config: WeightBus, host: str, go: threading.Event | None) -> None:
        super().__init__(config, host)
        self._go = go

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if index == 1:
            if self._go is None:
                raise LookupError("a mistake of ours")
            self._go.wait()
        super().broadcast(bucket, index)


def test_a_receiver_that_fails_is_named_now_and_later(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = r"the receiver in the engine ended: LookupError: a mistake of ours \[closed\]"
    with Pair(folder, partial(Stuck, go=None)) as pair:
        with lost(f"v1 was not staged: {ended}"):
            pair.intake.take(Sender(1).begin)
        assert "the receiver ends; no more updates arrive in this engine" in caplog.text
        pair.receiver.join(20)
        assert not pair.receiver.is_alive()
        pair.intake.forget()
        with lost(f"v2 was not staged, the receiver in the engine is lost: .*{ended}"):
            pair.intake.take(Sender(2).begin)


def test_a_receiver_that_does_not_answer_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weight_bus.remote.FORMING", -2)
    go = threading.Event()
    with Pair(folder, partial(Stuck, go=go), slack_s=0.3) as pair:
        started = time.monotonic()
        with lost(r"v1 was not staged: the receiver .* did not answer in .* s \[silent\]"):
            pair.intake.take(Sender(1).begin)
        assert time.monotonic() - started < 5
        with lost("v2 was not staged, the receiver in the engine is lost"):
            pair.intake.take(Sender(2).begin)
        threading.Timer(0.5, go.set).start()
        with Pair(folder, after=pair.receiver) as other:
            assert not pair.receiver.is_alive(), "what it had staged makes room first"
            assert "the rollout server is gone" in caplog.text and "the receiver ends" not in caplog.text
            check_next(other, other.intake, 3)


def test_a_receiver_that_does_not_come_is_named(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "nobody.sock"))
        listener.listen(1)
        with lost(r"did not connect in 0.2 s \[silent\]"):
            ReceiverConnection.accept(listener, 0.2)


def test_handles_are_exported_once_for_each_bucket_and_hold_none() -> None:
    exported: list[int] = []

    def export(bucket: torch.Tensor) -> dict[str, int]:
        exported.append(bucket.numel())
        return {"size": bucket.numel()}

    handles = Handles(export)
    buckets = [torch.empty(size, dtype=torch.uint8) for size in (10, 20)]
    assert handles.of(buckets) == handles.of(buckets) == [{"size": 10}, {"size": 20}]
    assert exported == [10, 20]
    buckets[1] = torch.empty(30, dtype=torch.uint8)
    assert handles.of(buckets) == [{"size": 10}, {"size": 30}] and exported == [10, 20, 30]
    held = [weakref.ref(bucket) for bucket in buckets]
    del buckets
    gc.collect()
    assert [ref() for ref in held] == [None, None], "the old ones make room"


def test_a_handle_travels_in_words() -> None:
    values = (0, b"\x00\xff handle", 4096, 512, b"\x80ref", 7, b"event", True)
    handle = dict(zip(CUDA_HANDLE, values, strict=True))
    taken = Taken(corrupt=[], seconds={}, memory=[{"kind": "staged", "take": 1, "cuda": in_words(handle)}])
    envelope = decode(encode(taken, RUN, 1), registry(Taken))
    assert isinstance(envelope.message, Taken) and in_bytes(envelope.message.memory[0]["cuda"]) == handle


ACCEPTED = registry(Done, Hosting)


def test_a_line_carries_messages_of_any_length_and_refuses_what_is_none() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    line, other = ReceiverConnection(ours), ReceiverConnection(theirs)
    facts = {f"fact {i}": "x" * 1000 for i in range(3000)}
    thread = threading.Thread(target=lambda: other.send(Hosting(facts=facts), "run"))
    thread.start()
    envelope = line.receive(ACCEPTED, 5)
    assert envelope is not None and (envelope.message, envelope.run_id) == (Hosting(facts=facts), "run")
    thread.join()
    with pytest.raises(TimeoutError):
        line.receive(ACCEPTED, 0.05)
    other.send(Forget())
    with pytest.raises(WireError, match="message kind 'Forget' is not accepted here"):
        line.receive(ACCEPTED, 5)
    theirs.sendall(LENGTH.pack(1) + LENGTH.pack(5) + b"hello")
    with pytest.raises(WireError, match="header"):
        line.receive(ACCEPTED, 5)
    for announced in (LENGTH.pack(1) + LENGTH.pack(MAX_MESSAGE_BYTES + 1), LENGTH.pack(1000)):
        theirs.sendall(announced)
        with pytest.raises(WireError, match="is announced"):
            line.receive(ACCEPTED, 5)
    theirs.sendall(LENGTH.pack(1) + LENGTH.pack(50) + b"half")
    other.close()
    other.close()
    assert line.receive(ACCEPTED, 5) is None
    line.close()
    assert line.receive(ACCEPTED, 5) is None
