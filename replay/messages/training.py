"""Between replay and learner ranks: batches out, commits in."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from replay.channel.frames import Message
from replay.messages.arrays import Float32, Int32, UInt8


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
    publish: bool = True
    """Whether the version that this step makes goes out; not while a resumed learner repeats journalled steps."""
    expected_digest: str = ""
    """Parameter digest that the journal has for this step; empty for a step that was never committed."""
    checkpoint: bool = False
    """Replay wants a checkpoint after this step: its journal is full."""
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
    kept: list[int] = field(default_factory=list)
    """Steps of all complete checkpoints; the journal keeps what they need."""
