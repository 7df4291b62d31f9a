"""Everything that travels between replay, rollout servers and learner ranks.

One ROUTER socket at replay, a DEALER at everyone else. Sends are at-least-once until acked; replay
deduplicates by group id = (pass over the data, prompt index).

| from           | messages                                                                              |
|----------------|---------------------------------------------------------------------------------------|
| anyone         | Hello, Heartbeat, Goodbye, StatusRequest                                              |
| rollout server | LeaseRequest, Renew, Cancel (gives a lease up), Group, EvaluationResult / -Failed      |
| learner rank   | Take, Committed, Published, Evaluate, CursorRequest, Checkpointed                      |
| replay         | Welcome, Refused, Lease, Cancel (no longer wanted), Ack, Batch, Proceed, Status, ...   |
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from replay.channel.frames import Message, registry

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]
Role = Literal["rollout_server", "learner", "launcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of every peer, and again after each reconnect."""

    role: Role
    name: str
    pid: int
    host: str
    rank: int = 0
    world_size: int = 1
    fingerprint: dict[str, str] = field(default_factory=dict)
    """What both ends must agree on (tokenizer, vocabulary, group size, ...), by name."""
    bus_address: str | None = None
    """Learner rank 0: control address of the weight bus."""
    version: int = 0
    """Learner rank 0: version of the weights that it holds at start."""
    cursor: dict[str, Any] | None = None
    """Learner rank 0 after `--resume`: replay's state from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Replay's answer to Hello."""

    incarnation: int
    version: int
    """Last committed version."""
    bus_address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """Replay does not admit this peer, or ends the run; the reason says why and what to do."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Sent by peers every `network.heartbeat_s` and answered by replay with one of its own."""

    activity: str = ""
    """What the sender is doing, in words, such as `waiting for leases`."""
    since_s: float = 0.0
    """For how long."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Numbers for the live view (tokens per second, running trajectories, idle seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """The sender leaves in good order; from replay: the run is over."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(Message):
    """Standing wish of a rollout server: hold up to `capacity` leases, with weights `version` live."""

    capacity: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Message):
    """A prompt handed to a rollout server."""

    pass_: int
    index: int
    attempt: int
    min_version: int
    lease_s: float
    seed: int
    prompt: dict[str, Any]
    """The normalised row: prompt (text or chat messages), ground_truth, data_source, extra_info, columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Message):
    """Leases still worked on: [pass, index, attempt, tokens so far] each."""

    leases: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """From a rollout server: this lease failed. From replay: stop working on it."""

    pass_: int
    index: int
    attempt: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Message):
    """A finished group: `n` trajectories of one prompt, concatenated.

    Example: 2 trajectories of 3 and 2 tokens have lengths [3, 2] and 5 entries in each token array.
    """

    ARRAYS: ClassVar[dict[str, str]] = {
        "prompt_ids": "int32",
        "lengths": "int32",
        "token_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "versions": "int32",
        "rewards": "float32",
    }
    pass_: int
    index: int
    attempt: int
    finish_reasons: list[str]
    texts: list[str]
    """Decoded answers, for the reader of rollouts."""
    reward_metrics: dict[str, float]
    """Mean of what a reward function returned besides its score, and reward/seconds."""
    generate_s: float
    data_source: str
    prompt_ids: Int32
    lengths: Int32
    token_ids: Int32
    """Answer tokens, environment tokens included."""
    loss_mask: UInt8
    """1 where the policy sampled the token."""
    logprobs: Float32
    """Behaviour logprob at rollout.temperature, from float32 logits."""
    versions: Int32
    """Policy version that sampled the token."""
    rewards: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Message):
    """Replay has this group, or will never want it; the sender may forget it."""

    pass_: int
    index: int
    attempt: int
    status: Literal["accepted", "superseded", "rejected"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take(Message):
    """Rank asks for its part of batch `step`; with `have` it says that it holds it."""

    step: int
    rank: int
    have: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Message):
    """One rank's part of batch `step`, with what every rank must know about the whole batch.

    `n` trajectories are this rank's, `N` are the batch's. Token arrays are concatenated over the n
    trajectories; token_ids holds prompt and answer, the other token arrays the answer only.
    """

    ARRAYS: ClassVar[dict[str, str]] = {
        "trajectory": "int32",
        "microbatch": "int32",
        "prompt_lengths": "int32",
        "lengths": "int32",
        "token_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "versions": "int32",
        "all_rewards": "float32",
        "all_groups": "int32",
        "all_loss_tokens": "int32",
    }
    step: int
    rank: int
    num_microbatches: int
    """The same for all ranks (invariant 9)."""
    total_loss_tokens: int
    """Tokens in the loss over the whole batch, before any trajectory is left out."""
    group_ids: list[list[int]]
    """[pass, index] of the batch's groups, oldest admitted first."""
    stats: dict[str, float]
    """Numbers about the whole batch, ready for metrics.jsonl."""
    lag_histogram: dict[str, int]
    """Trained tokens by lag."""
    trajectory: Int32
    """[n] position of each trajectory in the batch."""
    microbatch: Int32
    """[n] microbatch of each trajectory."""
    prompt_lengths: Int32
    lengths: Int32
    token_ids: Int32
    loss_mask: UInt8
    logprobs: Float32
    versions: Int32
    all_rewards: Float32
    """[N] rewards of the whole batch."""
    all_groups: Int32
    """[N] position in group_ids of each trajectory's group."""
    all_loss_tokens: Int32
    """[N] tokens in the loss of each trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed(Message):
    """All ranks hold their part of batch `step`: collectives may start."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """Rank 0: step `step` is in the weights, which are now version `step` with this parameter digest."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Message):
    """Rank 0: version `version` was handed to the weight bus."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorRequest(Message):
    """Rank 0 wants replay's state for a checkpoint."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor(Message):
    """Replay's state as a checkpoint of `step` needs it."""

    step: int
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Message):
    """Rank 0: the checkpoint of `step` is complete on disk."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Message):
    """Rank 0: evaluate this version; sent before the version is published."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLease(Message):
    """Evaluate these prompts with exactly this version. Outside admission."""

    version: int
    greedy: bool
    seed: int
    prompts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult(Message):
    """Scores of one evaluation, in the order of its prompts; replay forwards it to rank 0."""

    ARRAYS: ClassVar[dict[str, str]] = {"rewards": "float32", "lengths": "int32"}
    version: int
    greedy: bool
    seconds: float
    texts: list[str]
    finish_reasons: list[str]
    rewards: Float32
    lengths: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed(Message):
    """From a rollout server: it cannot finish this evaluation; another server that holds the version may."""

    version: int
    greedy: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationClosed(Message):
    """From replay: nobody needs this version for evaluation any more (done, or given up with a reason)."""

    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(Message):
    """Ask for Status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """Replay's view of the run, for the live view and for tests."""

    state: dict[str, Any]


TO_REPLAY = registry(
    Hello,
    Heartbeat,
    Goodbye,
    LeaseRequest,
    Renew,
    Cancel,
    Group,
    Take,
    Committed,
    Published,
    CursorRequest,
    Checkpointed,
    Evaluate,
    EvaluationResult,
    EvaluationFailed,
    StatusRequest,
)
FROM_REPLAY = registry(
    Welcome,
    Refused,
    Heartbeat,
    Goodbye,
    Lease,
    Cancel,
    Ack,
    Batch,
    Proceed,
    Cursor,
    EvaluationLease,
    EvaluationResult,
    EvaluationClosed,
    Status,
)
