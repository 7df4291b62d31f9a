"""What the replay benchmark puts around the real replay process: its cases, the files that it reads, and its peers.

Producers are many simulated rollout servers in one thread: each has a DEALER and an identity of its own, and keeps to
the protocol (Hello, LeaseRequest, a Group for every Lease, Heartbeats). Their groups are made before the measurement:
random, all different, of lognormal lengths. The learner, in another thread, has the real one's end of the channel: it
takes, commits and publishes; it trains nothing, and checks that no group comes twice and no token is too old. With a
slow disk it rests in each step, and a viewer asks for the state and hears the beats.
"""

import argparse
import base64
import itertools
import json
import os
import shutil
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from configs.loading import validate
from configs.schema import Config
from learner.batches import BatchReader
from replay import keys as make_keys
from replay import messages as m
from replay.channel import Dealer, Message, configure, decode, encode, load_keys, routing_id
from scripts.bench.core import CaseFailed
from slipstream.runtime.fingerprint import run_fingerprint

RUN_ID = "bench"
POLL_MS = 20
SPARE_SOCKETS = 16
TRAIN_S, VIEW_S, SILENT_S = 0.5, 0.02, 10.0
BEAT = m.Heartbeat(activity="simulated", gauges={"tokens_per_s": 1.0})
OF_EVERY_GROUP: Any = {"reward_metrics": {"reward/seconds": 0.01}, "generate_s": 1.0, "data_source": "bench"}

ROWS = 8192  # prompts of the data set
POOL = 256  # different groups that are prepared; the producers go through them in turn
MEDIAN, SIGMA, CAP = 2000, 0.7, 16_384  # of the lognormal lengths of answers, in tokens
SHORT = 200  # of a slow disk, whose latency is looked at: the processor must not be what is waited for
PROMPT_TOKENS = 256  # of every prompt; they are not counted as tokens of the result
GROUP_SIZE, GROUPS_PER_STEP = 8, 64
TEXT_BYTES_PER_TOKEN = 4
TOOL_SHARE = 0.25  # answers in which a fifth of the tokens, in one span, came from an environment
VOCAB_SIZE = 151_936
# replay reads what identifies a model; it needs no weights
MODEL: dict[str, Any] = {"config.json": {"model_type": "qwen3", "vocab_size": VOCAB_SIZE}, "tokenizer.json": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `hold` fills the buffer and takes nothing, for memory over queued bytes; with `sync_ms` every
    sync of replay takes so much longer, answers are SHORT, and the learner trains for TRAIN_S."""

    producers: int = 64
    curve: bool = True
    fsync: Literal["every", "interval", "never"] = "interval"
    lag: int = 1
    hold: bool = False
    sync_ms: float | None = None

    def __str__(self) -> str:
        curve = "CURVE" if self.curve else "no CURVE"
        return (
            f"{self.producers} producers, {curve}, fsync {self.fsync}"
            + (", buffer held" if self.hold else "")
            + self.slow
        )

    @property
    def slow(self) -> str:
        return "" if self.sync_ms is None else f", {self.sync_ms:g} ms more a sync"


CASES = [Case(), Case(curve=False), Case(fsync="every"), Case(fsync="never")]
CASES += [Case(producers=count) for count in (1, 10, 300, 1000)]
CASES += [Case(lag=8, hold=True), Case(producers=1000, lag=8, hold=True)]
QUICK_CASES = [Case(), Case(curve=False), Case(fsync="every"), Case(producers=300), Case(lag=2, hold=True)]


def write_files(options: argparse.Namespace) -> None:
    """Write the model folder, the prompts and the keys, anew each time."""
    work, rng = options.work, np.random.default_rng(0)
    for folder in (work / "model", work / "keys"):
        shutil.rmtree(folder, ignore_errors=True)
    (work / "model").mkdir(parents=True)
    for name, content in MODEL.items():
        (work / "model" / name).write_text(json.dumps(content), encoding="utf-8")
    prompts = [random_text(rng, PROMPT_TOKENS * TEXT_BYTES_PER_TOKEN) for _ in range(ROWS)]
    rows = [json.dumps({"prompt": prompt, "answer": prompt[:8]}) + "\n" for prompt in prompts]
    (work / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    make_keys.make(work / "keys", ["producers"], force=False)


def config_of(options: argparse.Namespace, case: Case) -> Config:
    """The configuration of one case. Raises ConfigError when the options do not fit together."""
    work = options.work
    steps = {"total_steps": 1_000_000, "batch_deadline_s": options.seconds + options.limit_s}
    tree: dict[str, Any] = {
        "run": {"name": "case", "dir": str(work / "runs")},
        "model": {"path": str(work / "model")},
        "data": {"train": str(work / "prompts.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "reward": {"function": "exact"},
        "rollout": {"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP, "max_new_tokens": CAP},
        "replay": {"async_lag": case.lag, "fsync": case.fsync},
        "learner": steps | {"max_tokens_per_microbatch": PROMPT_TOKENS + CAP},
        "evaluation": {"every_steps": 0},
        "network": {"keys": str(work / "keys") if case.curve else None, "silent_after_s": 30.0},
        "placement": {"device": "cpu", "split": "1:1"},
    }
    return validate(tree, f"the settings of {case}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group without what its lease decides: the id, the attempt and the versions."""

    arrays: dict[str, Any]  # fields of Group that no lease changes
    young: NDArray[np.int32]  # 1 for tokens that were sampled after the weights changed during the answer, else 0

    def group(self, lease: m.Lease, version: int) -> m.Group:
        """The answer to a lease by a server that holds `version`: its tokens are of that version or the one before."""
        oldest = max(lease.min_version, version - 1)
        versions = np.int32(oldest) + self.young * np.int32(version - oldest)
        ids: dict[str, Any] = {"pass_": lease.pass_, "index": lease.index, "attempt": lease.attempt}
        return m.Group(**ids, **OF_EVERY_GROUP, versions=versions, **self.arrays)


def random_text(rng: np.random.Generator, length: int) -> str:
    """ASCII text of six random bits a character; the length is a multiple of four."""
    return base64.b64encode(rng.bytes(length * 3 // 4)).decode("ascii")


def prepare(count: int, median: int = MEDIAN) -> list[Prepared]:
    """So many groups, the same ones each time."""
    rng = np.random.default_rng(1)
    return [_one(rng, median) for _ in range(count)]


def _one(rng: np.random.Generator, median: int) -> Prepared:
    drawn = median * np.exp(SIGMA * rng.standard_normal(GROUP_SIZE))
    lengths = np.clip(drawn, 1, CAP).astype(np.int32)
    total = int(lengths.sum())
    mask, young = np.ones(total, dtype=np.uint8), np.ones(total, dtype=np.int32)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        begin = end - length
        young[begin : begin + rng.integers(0, length + 1)] = 0
        if rng.random() < TOOL_SHARE:
            span = begin + int(rng.integers(0, length))
            mask[span : min(end, span + length // 5)] = 0
    arrays = {
        "prompt_ids": rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32),
        "lengths": lengths,
        "token_ids": rng.integers(0, VOCAB_SIZE, total, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": -rng.standard_exponential(total, dtype=np.float32),
        "rewards": rng.random(GROUP_SIZE, dtype=np.float32),
        "finish_reasons": ["length" if n == CAP else "stop" for n in lengths],
    }
    return Prepared(arrays, young)


@dataclass(slots=True)
class Counts:
    """What has happened so far; each number has one thread that writes it."""

    steps: int = 0  # committed; also the newest version
    tokens: int = 0  # answer tokens of committed steps
    batch_bytes: int = 0  # arrays of their batches
    joined: int = 0  # producers that replay has welcomed
    groups: int = 0  # accepted
    group_tokens: int = 0  # their answer tokens
    group_bytes: int = 0  # their frames


Times = dict[str, list[tuple[float, float]]]


def no_times() -> Times:
    """When it began, and seconds: from a Take to its Proceed, from a question to its Status, between two beats."""
    return {"batch": [], "status": [], "beat": []}


def hello_of(config: Config, name: str = "") -> m.Hello:
    """Of a rollout server in this process."""
    fingerprint = run_fingerprint(config)
    return m.Hello(
        role="rollout_server", name=name, pid=os.getpid(), host=socket.gethostname(), fingerprint=fingerprint
    )


class Viewer:
    """Asks replay for its state, and hears its beats as a rollout server that wants no leases."""

    def __init__(self, config: Config, address: str, times: Times) -> None:
        self.times, self.beat_at = times, 0.0
        self.hello = hello_of(config, "viewer")
        self.dealer = Dealer(address, f"viewer.{os.getpid()}", m.FROM_REPLAY, keys=load_keys(config.network.keys))

    def run(self, over: threading.Event) -> None:
        """Until it is over, or replay is silent."""
        with self.dealer:
            self.dealer.send(self.hello)
            while not over.wait(VIEW_S):
                asked = time.monotonic()
                self.dealer.send(BEAT)
                self.dealer.send(m.StatusRequest())
                while (envelope := self.dealer.poll(SILENT_S)) is not None:
                    now = time.monotonic()
                    if isinstance(envelope.message, m.Heartbeat):
                        if self.beat_at:
                            self.times["beat"].append((self.beat_at, now - self.beat_at))
                        self.beat_at = now
                    elif isinstance(envelope.message, m.Status):
                        self.times["status"].append((asked, now - asked))
                        break


@dataclass(slots=True)
class Producer:
    """One simulated rollout server."""

    name: str
    socket: "zmq.Socket[bytes]"
    sequence: int = 0
    incarnation: int = 0  # 0 until replay has a learner; then leases may be asked for
    version: int = -1
    joined: bool = False

    def send(self, message: Message) -> int:
        """Send a message; its bytes."""
        self.sequence += 1
        frames = encode(message, RUN_ID, self.sequence)
        self.socket.send_multipart(frames, copy=False)
        return sum(map(len, frames))


class Producers:
    def __init__(self, config: Config, address: str, counts: Counts, case: Case) -> None:
        median = MEDIAN if case.sync_ms is None else SHORT
        self.config, self.counts, self.pool = config, counts, itertools.cycle(prepare(POOL, median))
        count = case.producers
        self.sent: dict[tuple[int, int, int], tuple[int, int]] = {}  # (tokens, bytes) of what is not acked, by lease
        self.capacity = -(-2 * (config.replay.async_lag + 1) * config.rollout.groups_per_step // count)
        self.hello = hello_of(config)
        self.context = zmq.Context()  # one for all: each has threads of its own
        self.context.set(zmq.MAX_SOCKETS, count + SPARE_SOCKETS)
        self.poller = zmq.Poller()
        keys, limits = load_keys(config.network.keys), config.network.max_message_bytes
        self.by_socket: dict[Any, Producer] = {}
        for i in range(count):
            dealer = self.context.socket(zmq.DEALER)
            configure(dealer, keys, limits)
            dealer.setsockopt(zmq.IDENTITY, routing_id(f"rollout-{i}.{os.getpid()}"))
            dealer.connect(address)
            self.poller.register(dealer, zmq.POLLIN)
            self.by_socket[dealer] = Producer(f"rollout-{i}", dealer)

    def run(self, over: threading.Event) -> None:
        """Until it is over. Raises CaseFailed when replay refuses something."""
        next_beat = 0.0
        while not over.is_set():
            beat, version = time.monotonic() >= next_beat, self.counts.steps
            if beat:
                next_beat = time.monotonic() + self.config.network.heartbeat_s
            for producer in self.by_socket.values():
                if beat:  # a connection that was given up during its handshake has lost its Hello
                    producer.send(BEAT if producer.joined else replace(self.hello, name=producer.name))
                # in the place of the weight bus: every server gets the newest version, and says so
                if producer.incarnation and producer.version < version:
                    producer.version, incarnation = version, producer.incarnation
                    producer.send(m.LeaseRequest(capacity=self.capacity, version=version, incarnation=incarnation))
            for ready, _ in self.poller.poll(POLL_MS):
                self.drain(self.by_socket[ready])
        self.context.destroy(linger=0)

    def drain(self, producer: Producer) -> None:
        """Everything that has arrived for one producer; each lease is answered with the next prepared group."""
        while True:
            try:
                frames = producer.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            match decode(frames, m.FROM_REPLAY).message:
                case m.Lease() as lease:
                    prepared = next(self.pool)
                    size = producer.send(prepared.group(lease, producer.version))
                    self.sent[lease.pass_, lease.index, lease.attempt] = (prepared.young.size, size)
                case m.Ack(status="accepted") as ack:
                    tokens, size = self.sent.pop((ack.pass_, ack.index, ack.attempt))
                    self.counts.groups += 1
                    self.counts.group_tokens += tokens
                    self.counts.group_bytes += size
                case m.Welcome() as welcome:
                    self.counts.joined += not producer.joined
                    producer.joined, producer.incarnation = True, welcome.incarnation
                case m.Ack() | m.Refused() | m.Cancel() as message:
                    raise CaseFailed(f"replay refused what {producer.name} sent: {message}")


class Learner:
    """Rank 0 of one."""

    def __init__(self, config: Config, address: str, counts: Counts, checkpoint_every: int, times: Times) -> None:
        self.config, self.counts, self.checkpoint_every, self.times = config, counts, checkpoint_every, times
        self.train_s = 0.0
        self.trained: set[tuple[int, int]] = set()
        self.batches = BatchReader(config, address, rank=0, fingerprint=run_fingerprint(config))

    def run(self, over: threading.Event, hold: bool) -> None:
        """Join, then step after step until it is over; its Goodbye ends the run. With `hold` it takes nothing."""
        self.batches.connect()
        self.batches.join(version=0, digest="", bus_address=None, cursor=None)
        while not over.wait(0.1 if hold else 0):
            if not hold:
                self.step(self.counts.steps + 1)
        self.batches.close("the benchmark is over", failed=False)

    def step(self, step: int) -> None:
        """Take, commit, publish."""
        send, digest = self.batches._dealer.send, f"simulated-{step}"  # replay is not restarted: nothing to repeat
        asked = time.monotonic()
        batch = self.batches.take(step, lambda batch: None)
        self.times["batch"].append((asked, time.monotonic() - asked))
        tokens = self.check(batch, step)
        send(m.Committed(step=step, digest=digest))
        if batch.checkpoint or step % self.checkpoint_every == 0:
            self.batches.cursor(step)
            send(m.Checkpointed(step=step, kept=[step]))
        send(m.Published(version=step, digest=digest))
        self.counts.tokens += tokens
        self.counts.batch_bytes += sum(getattr(batch, name).nbytes for name in batch.ARRAYS)
        self.counts.steps = step
        time.sleep(self.train_s)  # in the place of training: what follows from the commit is done then

    def check(self, batch: m.Batch, step: int) -> int:
        """Answer tokens of a batch. Raises CaseFailed when it is of another step, or has a group again."""
        expected = self.config.rollout.groups_per_step
        groups = {(pass_, index) for pass_, index in batch.group_ids}
        tokens = int(batch.lengths.sum())
        if batch.step != step or len(groups) != expected or batch.versions.size != tokens:
            raise CaseFailed(f"batch {batch.step} of {len(groups)} groups came for step {step} of {expected} groups")
        if groups & self.trained:
            raise CaseFailed(f"batch {step} has group {min(groups & self.trained)} a second time")
        self.trained |= groups
        if int(batch.versions.min()) < step - 1 - self.config.replay.async_lag:
            raise CaseFailed(f"batch {step} has a token of version {int(batch.versions.min())}")
        return tokens
