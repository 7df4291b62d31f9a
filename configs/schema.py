"""The whole configuration: one pydantic tree, cross-checked before any process starts.

`Config` is the only source of defaults. Cross-field checks live here, so that a run that cannot work or
would be silently wrong is refused with the key, the value and a way out.
"""

import ipaddress

from pydantic import Field, model_validator

from configs.algorithm import Algorithm, Replay, Rollout
from configs.auto import resolve
from configs.base import Section
from configs.data import Data, Model, Reward, Tracking
from configs.infrastructure import Network, Placement, WeightBus
from configs.learner import Checkpoint, Evaluation, LearnerSettings, Limits
from configs.placement import Share, check, shares

MAX_ASYNC_LAG = 8
Needed = dict[str, tuple[str, ...]]
STAGED: Needed = {"weight_bus.apply": ("staged",)}
COLLECTIVE: Needed = {"weight_bus.transport": ("collective",), "weight_bus.backend": ("gloo", "nccl")}
NEEDS: tuple[tuple[str, str | bool, str, Needed], ...] = (
    ("weight_bus.apply", "direct", "staged", {"rollout.engine": ("sglang",)}),
    ("weight_bus.stage_in", "engine", "server", STAGED | COLLECTIVE | {"rollout.engine": ("sglang",)}),
    ("weight_bus.transport", "disk", "collective", STAGED),
    ("weight_bus.delta", True, "false", STAGED),  # the version before it must lie beside the engine
)
OFFLOAD_NEEDS: dict[str, tuple[str | bool, ...]] = {"learner.recompute": ("full", "auto"), "learner.compile": (False,)}
"""Compiled code saves weights among its inputs, which would travel as well."""
"""(key, value, what works everywhere, what this value needs of other keys)"""


class Run(Section):
    """Identity of the run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder."""
    dir: str = "runs"
    """Folder that holds run folders."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the data order, sampling and everything else that is random."""


class Config(Section):
    """One run of Slipstream. `Config.group_batch` and the other properties are derived, never set."""

    run: Run = Run()
    model: Model
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    replay: Replay = Replay()
    algorithm: Algorithm = Algorithm()
    learner: LearnerSettings = LearnerSettings()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    weight_bus: WeightBus = WeightBus()
    network: Network = Network()
    placement: Placement = Placement()
    tracking: Tracking = Tracking()
    limits: Limits = Limits()

    @property
    def run_dir(self) -> str:
        """Folder of this run."""
        return f"{self.run.dir}/{self.run.name}"

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories in one optimizer step."""
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def learner_nodes(self) -> list[str]:
        """Nodes with learner ranks, the first one with replay and rank 0."""
        return [share.node for share in self.shares if share.learner]

    @property
    def num_learner_ranks(self) -> int:
        """Ranks of the learner over all nodes, one a device."""
        return sum(len(share.learner) for share in self.shares)

    @property
    def num_data_ranks(self) -> int:
        """Parts of a batch: learner ranks, those that compute the same rows together (learner.mesh) counted once."""
        return self.num_learner_ranks // self.learner.mesh.model_ranks

    @property
    def max_tokens_per_row(self) -> int:
        """Tokens of a microbatch, of which each context rank holds its share."""
        return self.learner.max_tokens_per_microbatch * self.learner.mesh.context

    @property
    def num_rollout_devices(self) -> int:
        """Devices given to rollout servers over all nodes."""
        return sum(len(share.rollout) for share in self.shares)

    @property
    def num_rollout_servers(self) -> int:
        """Engines, each over `tensor_parallel` devices."""
        return self.num_rollout_devices // self.placement.tensor_parallel

    @property
    def max_groups_in_flight(self) -> int:
        """Admission bound: leased + buffered + taken but not committed (invariant 1)."""
        return (self.replay.async_lag + 1) * self.rollout.groups_per_step

    @property
    def on_new_weights(self) -> str:
        """What running requests do at an update, with `auto` resolved."""
        if self.rollout.on_new_weights != "auto":
            return self.rollout.on_new_weights
        return "drain" if self.replay.async_lag == 0 else "keep_kv"

    def is_evaluated(self, version: int) -> bool:
        """Whether this policy version is evaluated."""
        every = self.evaluation.every_steps
        if self.data.eval is None or every == 0 or not (self.evaluation.greedy or self.evaluation.sampled):
            return False
        return version % every == 0 or version == self.learner.total_steps

    def arithmetic(self) -> str:
        """The run's arithmetic and what `auto` has become, printed at start."""
        rollout, ranks, together = self.rollout, self.num_data_ranks, self.learner.mesh.model_ranks
        per_rank = f"{self.trajectories_per_step / ranks:.4g}"
        many = "s" if ranks > 1 else ""
        parts = f"learner rank{many}" if together == 1 else f"group{many} of {together} learner ranks"
        return (
            f"{rollout.groups_per_step} prompts × {rollout.group_size} = {self.trajectories_per_step} trajectories"
            f" a step → {per_rank} on each of {ranks} {parts}, microbatches of at most"
            f" {self.max_tokens_per_row} tokens; lag ≤ {self.replay.async_lag} → at most"
            f" {self.max_groups_in_flight} groups in flight, the batch in training included."
            f" {self.learner.total_steps} steps, one update and one weight broadcast each, to"
            f" {self.num_rollout_servers} rollout server{'s' if self.num_rollout_servers > 1 else ''}."
            f" Rollouts: {rollout.engine}, {rollout.dtype}; learner: {self.learner.compute_dtype}; weights over"
            f" {self.weight_bus.backend if self.weight_bus.transport == 'collective' else 'disk'}."
        )

    @property
    def shares(self) -> tuple[Share, ...]:
        """Devices by node, the first learner node first."""
        return shares(self.placement)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_resolved(cls, tree: object) -> object:
        return resolve(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _placement_is_possible(self) -> "Config":
        check(self.placement)
        if self.placement.share_gpus and self.weight_bus.backend == "nccl":
            raise ValueError(
                "placement.share_gpus: true with weight_bus.backend 'nccl', which refuses two processes of a group on"
                " one GPU; take weight_bus.backend=gloo"
            )
        return self

    @model_validator(mode="after")
    def _mesh_fits_the_ranks(self) -> "Config":
        mesh, ranks = self.learner.mesh, self.num_learner_ranks
        if ranks % (mesh.replicate * mesh.model_ranks):
            raise ValueError(
                f"learner.mesh: {mesh} = {mesh.replicate * mesh.model_ranks} does not divide the {ranks} learner"
                f" rank{'s' if ranks > 1 else ''} of the placement; take other sizes, or give the learner a multiple of"
                f" {mesh.replicate * mesh.model_ranks} devices"
            )
        if self.learner.compile and mesh.model_ranks > 1:
            raise ValueError(
                f"learner.compile: true with learner.mesh.tensor {mesh.tensor} and learner.mesh.context {mesh.context}:"
                " torch's compiler does not take rows of any length through DTensor (RecursionError in torch 2.13), and"
                " not yet measured is the exchange around attention; take learner.compile=false"
            )
        for share in self.shares:
            if len(share.learner) % mesh.tensor:
                raise ValueError(
                    f"learner.mesh.tensor: {mesh.tensor} ranks that compute each layer together must be of one node,"
                    f" and {share.node} has {len(share.learner)} learner devices; give it a multiple of {mesh.tensor}"
                )
        return self

    @model_validator(mode="after")
    def _batch_is_large_enough(self) -> "Config":
        total, ranks = self.trajectories_per_step, self.num_data_ranks
        if total < ranks:
            raise ValueError(
                f"rollout.groups_per_step: {self.rollout.groups_per_step} groups × rollout.group_size"
                f" {self.rollout.group_size} = {total} trajectories a step are fewer than {ranks} learner ranks;"
                f" take {-(-ranks // self.rollout.group_size)} groups or more, or another placement.split"
            )
        if self.rollout.group_size == 1:
            raise ValueError(
                f"rollout.group_size: 1 with algorithm.advantage {self.algorithm.advantage!r}, which compares the"
                " answers of a group: each would have advantage 0 and no step would change the weights; take 2 or more,"
                " such as 8"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.max_tokens_per_row:
            context = self.learner.mesh.context
            of = f" × learner.mesh.context {context}" if context > 1 else ""
            raise ValueError(
                f"learner.max_tokens_per_microbatch: {self.learner.max_tokens_per_microbatch}{of} is less than one"
                f" trajectory of data.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens;"
                f" raise it to {-(-longest // context)} or more"
            )
        return self

    @model_validator(mode="after")
    def _activations_can_travel(self) -> "Config":
        found = {f"learner.{name}": value for name, value in self.learner}
        for key, possible in OFFLOAD_NEEDS.items() if self.learner.offload_activations else ():
            if found[key] not in possible:
                way_out = str(possible[0]).lower()
                raise ValueError(f"learner.offload_activations: true with {key} {found[key]!r}; take {key}={way_out}")
        return self

    @model_validator(mode="after")
    def _lag_is_corrected(self) -> "Config":
        lag = self.replay.async_lag
        if lag > MAX_ASYNC_LAG:
            raise ValueError(
                f"replay.async_lag: {lag} is above {MAX_ASYNC_LAG}, past which no correction held in measurement;"
                f" take {MAX_ASYNC_LAG} or less"
            )
        if lag > 0 and not (self.algorithm.is_corrected or self.algorithm.i_know_this_is_biased):
            what = "algorithm.proximal" if self.algorithm.has_ratio else "algorithm.loss"
            raise ValueError(
                f"{what}: {self.algorithm.proximal if self.algorithm.has_ratio else self.algorithm.loss!r} corrects"
                f" nothing for replay.async_lag {lag}, and such runs collapse; take 'ppo_clip', or an"
                " algorithm.correction, or set algorithm.i_know_this_is_biased=true for a negative control"
            )
        if lag == 0 and self.rollout.on_new_weights not in ("auto", "drain"):
            raise ValueError(
                f"rollout.on_new_weights: {self.rollout.on_new_weights!r} at replay.async_lag 0; synchronous training"
                " drains, so take 'auto' or 'drain'"
            )
        return self

    @model_validator(mode="after")
    def _weights_can_travel(self) -> "Config":
        bus, tensor_parallel = self.weight_bus, self.placement.tensor_parallel
        if bus.transport == "disk" and bus.folder is None:
            raise ValueError("weight_bus.transport: 'disk' needs weight_bus.folder, which all nodes see")
        found = {f"weight_bus.{name}": value for name, value in bus} | {"rollout.engine": self.rollout.engine}
        for key, value, instead, needed in NEEDS:
            for other, possible in needed.items() if found[key] == value else ():
                if found[other] not in possible:
                    raise ValueError(
                        f"{key}: {value!r} with {other} {found[other]!r}; take {key}={instead}, or"
                        f" {other}={' or '.join(possible)}"
                    )
        if bus.stage_in == "engine" and bus.backend == "gloo" and tensor_parallel > 1:
            raise ValueError(
                f"weight_bus.stage_in: 'engine' with weight_bus.backend 'gloo' and placement.tensor_parallel"
                f" {tensor_parallel}: what is staged in host memory of one scheduler no other one can read; take"
                " weight_bus.stage_in=server, or weight_bus.backend=nccl"
            )
        if bus.compression != "none" and (not bus.delta or (bus.backend, bus.transport) == ("nccl", "collective")):
            why = "is of what weight_bus.delta sends" if not bus.delta else "works on host memory, and nccl on GPUs"
            raise ValueError(
                f"weight_bus.compression: {bus.compression!r} {why}; take compression=none, or change that"
            )
        return self

    @model_validator(mode="after")
    def _network_is_safe(self) -> "Config":
        network = self.network
        if not is_loopback(network.host) and network.keys is None and not network.insecure:
            raise ValueError(
                f"network.host: {network.host!r} leaves the loopback interface and no keys are configured;"
                " bind 127.0.0.1, make keys (python -m replay.keys --out keys) and set network.keys=keys, or set"
                " network.insecure=true on a network that you trust"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
