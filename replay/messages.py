"""Everything that travels between replay, rollout servers and learner ranks.

One ROUTER socket at replay, DEALERs elsewhere. Sends are at-least-once until acked, groups known by their ids.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from replay.arrays import Float32 as Float32
from replay.arrays import Int32 as Int32
from replay.arrays import UInt8 as UInt8
from replay.arrays import no_bytes, no_floats, no_ints
from replay.channel.frames import Message, registry
from replay.evaluation_messages import Evaluate as Evaluate
from replay.evaluation_messages import EvaluationClosed as EvaluationClosed
from replay.evaluation_messages import EvaluationFailed as EvaluationFailed
from replay.evaluation_messages import EvaluationLease as EvaluationLease
from replay.evaluation_messages import EvaluationResult as EvaluationResult
from replay.evaluation_messages import OfPart as OfPart

ADDRESS = re.compile(r"tcp://[^\s/@]{1,255}:\d{1,5}( [0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?")
"""Of a teacher's socket, and its public key where the run has keys."""
Role = Literal["rollout_server", "learner", "launcher", "teacher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of every peer, and again after each reconnect."""

    role: Role
    name: str
    pid: int
    host: str
    rank: int = 0
    world_size: int = 1
    fingerprint: dict[str, str] = field(default_factory=dict)  # by name, what both ends must agree on
    digest: str = ""
    bus_address: str | None = None
    """Learner rank 0: control address of the weight bus; a teacher: of the one that it follows."""
    version: int = 0
    """Learner: version of the weights that it holds at start; `digest` is their parameter digest."""
    incarnation: int = 0
    """Learner: the incarnation that it has, when it comes back to a replay that was restarted; 0 at its own start."""
    cursor: dict[str, Any] | None = None  # learner rank 0 after `--resume`: replay's state from the checkpoint
    rolls_back: bool = False
    """Learner rank 0: the line of policies ends at `version`; what was made and sampled after it does not count."""
    leaves_out_flat_groups: bool = False  # a learner, groups whose rewards are all equal
    teacher: str = ""
    """Process of a teacher: which one (`teachers`); `version` and `digest` are those of the weights that it holds, and
    it says Hello again when they change. Without a digest, it waits for weights, and is not asked."""
    address: str = ""  # of a teacher, where rollout servers ask it
    teacher_buses: dict[str, str] = field(default_factory=dict)
    """Learner rank 0: control address of the weight bus of each teacher that is refreshed, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Replay's answer to Hello."""

    incarnation: int
    version: int
    """Last committed version; to a learner rank: of its own line, so the version that it holds itself."""
    bus_address: str | None
    """Of the weight bus; to a teacher, of its own."""
    resumes_until: int = 0
    """To learner ranks: steps up to this one are in the journal already and are taken again as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """Replay does not admit this peer, or this message of it; the reason says why and what to do, `code` decides."""

    reason: str
    code: Literal["hello", "peer", "message"] = "peer"
    """Hello mends it, for something was lost; this peer may not take part; one message cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Sent by peers every `network.heartbeat_s` and answered by replay with one of its own."""

    activity: str = ""  # what the sender is doing, in words such as `waiting for leases`, and for how long
    since_s: float = 0.0
    gauges: dict[str, float] = field(default_factory=dict)  # numbers for the live view; none leaves the last ones
    blocked: str = ""  # code of what keeps it from all work: of replay `disk`, of a server `quarantined`


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """The sender leaves in good order; from replay: the run is over."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest(Message):
    """Ask for Status, or for replay's `clock` or the run's `config` alone."""

    about: Literal["run", "clock", "config"] = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """Replay's view of the run, for the live view and for tests."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(Message):
    """Standing wish of a rollout server: hold up to `capacity` leases, with weights `version` live."""

    capacity: int
    version: int
    incarnation: int = 0  # of the learner that made the version


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLease(Message):
    """About one attempt at a prompt."""

    pass_: int
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(OfLease):
    """A prompt handed to a rollout server."""

    min_version: int
    lease_s: float
    seed: int
    prompt: dict[str, object]
    """The normalised row: prompt (text or chat messages), ground_truth, data_source, extra_info, columns."""
    prefix_finished: list[str] = field(default_factory=list)
    prefix_lengths: Int32 = field(default_factory=no_ints)
    """[n] each, or empty: why an earlier attempt has ended an answer ("": go on with it), and its tokens so far."""
    prefix_token_ids: Int32 = field(default_factory=no_ints)
    prefix_logprobs: Float32 = field(default_factory=no_floats)
    prefix_versions: Int32 = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Message):
    """All that a server holds, each beat (replay/channel/delivery.py); [pass, index, attempt, tokens so far] of leases.

    With replay.partial_rollouts, or before it leaves, also what is new. Example: progress [[0, 1, 7, 2, 0]] says that
    answer 1 of leases[0] had 7 tokens and has got the 2 in the arrays; 1 says that a stop token ended it, 2 its length.
    """

    leases: list[list[int]]
    finished: list[list[int]] = field(default_factory=list)  # [pass, index, attempt] of groups sent, not acknowledged
    evaluations: list[list[int | str | bool]] = field(default_factory=list)
    """[version, set, greedy, first, whether its result was sent] of parts of evaluations."""
    queued: list[int] = field(default_factory=list)  # positions in `leases` of those that wait: nothing of them runs
    sampled: int = 0
    """Tokens that the engine has sampled since its start, of evaluations too: whether it works at all."""
    progress: list[list[int]] = field(default_factory=list)  # [position in leases, answer, tokens before, new, 0|1|2]
    token_ids: Int32 = field(default_factory=no_ints)
    logprobs: Float32 = field(default_factory=no_floats)
    versions: Int32 = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(OfLease):
    """From a rollout server: this lease failed. From replay: stop working on it."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(OfLease):
    """A finished group: `n` trajectories of one prompt, concatenated; S samples, mostly one of each trajectory.

    Example: 2 trajectories of 3 and 2 tokens have lengths [3, 2] and 5 entries in each token array. If the first one's
    context was compacted once: samples [2, 1], lengths [3, 4, 2], prompt_lengths [5, 6, 5], 16 prompt_ids.
    """

    finish_reasons: list[str]
    reward_metrics: dict[str, float]
    generate_s: float
    data_source: str
    prompt_ids: Int32
    """Of all samples, or with `prompt_lengths` of each, concatenated."""
    lengths: Int32  # [S] tokens of each sample after its prompt
    token_ids: Int32
    loss_mask: UInt8
    """Answer tokens, environment tokens included, and 1 where the policy sampled one."""
    logprobs: Float32
    """Behaviour logprob at rollout.temperature, from float32 logits; 0 of a token of the environment."""
    versions: Int32
    """Policy version that sampled the token; of the sampled token before it, where the environment gave it."""
    rewards: Float32
    samples: Int32 = field(default_factory=no_ints)
    """[n] samples of each trajectory; empty: one each."""
    prompt_lengths: Int32 = field(default_factory=no_ints)
    """[S] tokens of each sample's own prompt; empty: all have the same one."""
    pictures: list[str] = field(default_factory=list)
    """`digest:size:path` of each picture of the prompt; without a path, so many of the bytes below are it."""
    picture_bytes: UInt8 = field(default_factory=no_bytes)
    errors: list[str] = field(default_factory=list)
    """[n] code of why each trajectory failed, "" where it did not; empty: none did. `error_detail` is of the first."""
    left_out: UInt8 = field(default_factory=no_bytes)
    """[n] 1 for a failed trajectory that is not trained, of which `samples` may be 0; empty: none."""
    error_detail: str = ""
    policies: list[list[int]] = field(default_factory=list)
    """[incarnation, version] of each policy that may have sampled a token of it. Empty: of what its sender serves."""
    routing: UInt8 = field(default_factory=no_bytes)
    prompt_routing: UInt8 = field(default_factory=no_bytes)
    routing_sums: Int32 = field(default_factory=no_ints)
    """Experts of tokens and of prompts, and [S] a sum of each sample (replay/routing.py); empty: none are replayed."""
    routing_place: list[int] = field(default_factory=list)  # in the journal: file, byte, sizes of the two
    teachers: list[str] = field(default_factory=list)
    """[n] `name@version` of each trajectory's teacher, "" of one that is left out unscored; empty: none is asked."""
    teacher_logprobs: Float32 = field(default_factory=no_floats)
    """The teacher's logprob of each answer token at rollout.temperature; 0 of a token that is not in the loss."""
    teacher_ids: Int32 = field(default_factory=no_ints)
    teacher_top: Float32 = field(default_factory=no_floats)
    """The teacher's own k likeliest ids of each answer token, the likeliest first, and their logprobs; 0 outside the
    loss; empty: algorithm.distillation wants none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers(Message):
    """Where rollout servers ask teachers: at Welcome, and again when one comes, goes or has another version."""

    entries: list[list[str | int]]
    """[name, address (as ADDRESS), version, digest] of each process, in order; those of one name share the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(OfLease):
    """Replay has this group, or will never want it: the sender may forget it. Of one that was lost, `missing`."""

    status: Literal["accepted", "superseded", "rejected", "missing"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStep(Message):
    """About one step."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take(OfStep):
    """Rank asks for its part of batch `step`; with `have` it says that it holds it."""

    rank: int
    have: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(OfStep):
    """One rank's part of batch `step`, with what every rank must know about the whole batch.

    `n` samples are this rank's, `N` trajectories are the batch's; mostly a trajectory is one sample. Token arrays are
    concatenated over the n samples; token_ids holds prompt and answer, the other token arrays the answer only.
    """

    rank: int
    num_microbatches: int
    total_loss_tokens: int
    """Tokens in the loss over the whole batch, before any trajectory is left out."""
    group_ids: list[list[int]]
    """[pass, index] of the batch's groups, oldest admitted first."""
    stats: dict[str, float]
    lag_histogram: dict[str, int]
    publish: bool = True
    """Whether its version goes out; not while a resumed learner repeats journalled steps."""
    expected_digest: str = ""
    """Parameter digest that the journal has for this step; empty for a step that was never committed."""
    checkpoint: bool = False
    """Replay wants a checkpoint after this step: its journal is full, or the run is about to be ended."""
    async_lag: int = -1
    """Bound of the lag that its groups were admitted under; -1: the configured one."""
    trajectory: Int32
    microbatch: Int32
    """[n] of each sample: position in the batch of its trajectory, and its microbatch."""
    prompt_lengths: Int32
    lengths: Int32
    token_ids: Int32
    loss_mask: UInt8
    logprobs: Float32
    versions: Int32
    all_rewards: Float32  # [N] of the whole batch
    all_groups: Int32
    all_loss_tokens: Int32
    """[N] of each trajectory: position in group_ids of its group, its tokens in the loss, samples (empty: one each)."""
    all_samples: Int32 = field(default_factory=no_ints)
    minibatches: list[list[int]] = field(default_factory=list)  # [groups, microbatches] of each, oldest groups first
    taught: list[int] = field(default_factory=lambda: [0, 0])
    """How many of the last groups, of one trajectory each, and of the last microbatches are rows of learner.sft."""
    pictures: list[str] = field(default_factory=list)
    picture_bytes: UInt8 = field(default_factory=no_bytes)
    picture_counts: Int32 = field(default_factory=no_ints)
    """Of each of group_ids, 0 where no sample of it is here; empty: no prompt has pictures."""
    routing: UInt8 = field(default_factory=no_bytes)
    prompt_routing: UInt8 = field(default_factory=no_bytes)
    routing_starts: Int32 = field(default_factory=no_ints)
    routing_sums: Int32 = field(default_factory=no_ints)
    """As in Group, and [n] the first row of each sample's prompt; empty: none are replayed."""
    teachers: list[str] = field(default_factory=list)
    teacher_logprobs: Float32 = field(default_factory=no_floats)
    teacher_ids: Int32 = field(default_factory=no_ints)
    teacher_top: Float32 = field(default_factory=no_floats)
    """As in Group, of the n samples; empty: rollout servers ask no teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(OfStep):
    """Answer to a repeated Take: this rank's part of batch `step` was sent before. A rank without it says Hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed(OfStep):
    """All ranks hold their part of batch `step`: collectives may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(OfStep):
    """Rank 0: step `step` is in the weights, which are now version `step` with this parameter digest."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Message):
    """Rank 0: version `version` was handed to the weight bus."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorRequest(OfStep):
    """Rank 0 wants replay's state for a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor(OfStep):
    """Replay's state as a checkpoint of `step` needs it."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(OfStep):
    """Rank 0: the checkpoint of `step` is complete on disk."""

    kept: list[int] = field(default_factory=list)
    """Steps of all complete checkpoints; the journal keeps what they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerLag(OfStep):
    """Rank 0: a guard that judged this step lowers the bound of the lag, for prompts that are admitted from now on."""

    async_lag: int


FROM_SERVERS = (LeaseRequest, Renew, Cancel, Group, EvaluationResult, EvaluationFailed)
FROM_RANK_0 = (Committed, Published, Evaluate, CursorRequest, Checkpointed, LowerLag)
TO_REPLAY = registry(Hello, Heartbeat, Goodbye, StatusRequest, *FROM_SERVERS, Take, *FROM_RANK_0)
TO_SERVERS = (Lease, Cancel, Ack, EvaluationLease, EvaluationClosed, Teachers)
TO_LEARNER = (Batch, Sent, Proceed, Cursor, EvaluationResult, EvaluationClosed)
FROM_REPLAY = registry(Welcome, Refused, Heartbeat, Goodbye, Status, *TO_SERVERS, *TO_LEARNER)
