"""Between replay and rollout servers: prompts out, trajectories in."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from replay.channel.frames import Message
from replay.messages.arrays import Float32, Int32, UInt8, empty


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(Message):
    """Standing wish of a rollout server: hold up to `capacity` leases, with weights `version` live."""

    capacity: int
    version: int
    incarnation: int = 0
    """Of the learner that made the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Message):
    """A prompt handed to a rollout server."""

    ARRAYS: ClassVar[dict[str, str]] = {
        "prefix_lengths": "int32",
        "prefix_token_ids": "int32",
        "prefix_logprobs": "float32",
        "prefix_versions": "int32",
    }
    pass_: int
    index: int
    attempt: int
    min_version: int
    lease_s: float
    seed: int
    prompt: dict[str, Any]
    """The normalised row: prompt (text or chat messages), ground_truth, data_source, extra_info, columns."""
    prefix_finished: list[str] = field(default_factory=list)
    """[n] or empty: finish reason of answers that an earlier attempt has completed, "" of those to go on with."""
    prefix_lengths: Int32 = field(default_factory=partial(empty, np.int32))
    """[n] or empty: tokens of each answer that an earlier attempt has sampled already."""
    prefix_token_ids: Int32 = field(default_factory=partial(empty, np.int32))
    prefix_logprobs: Float32 = field(default_factory=partial(empty, np.float32))
    prefix_versions: Int32 = field(default_factory=partial(empty, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Message):
    """Leases still worked on: [pass, index, attempt, tokens so far] each.

    With replay.partial_rollouts also what was sampled since the last one. Example: progress [[0, 1, 7, 2, 0]] says that
    answer 1 of leases[0] had 7 tokens and has got the 2 in the arrays; the last number is 1 once it is complete by a
    stop token, 2 by its length.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32", "versions": "int32"}
    leases: list[list[int]]
    progress: list[list[int]] = field(default_factory=list)
    """[position in leases, answer, tokens before, new tokens, 0 | 1 | 2] each."""
    token_ids: Int32 = field(default_factory=partial(empty, np.int32))
    logprobs: Float32 = field(default_factory=partial(empty, np.float32))
    versions: Int32 = field(default_factory=partial(empty, np.int32))


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
    policies: list[list[int]] = field(default_factory=list)
    """[incarnation, version] of each policy that may have sampled a token of this group. Empty: each version is of the
    incarnation that its sender serves now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Message):
    """Replay has this group, or will never want it; the sender may forget it."""

    pass_: int
    index: int
    attempt: int
    status: Literal["accepted", "superseded", "rejected"]
    reason: str = ""
