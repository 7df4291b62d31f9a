"""The sections of a configuration, and what follows from them. Checks across sections: configs/schema.py."""

from typing import Self

from pydantic import Field, model_validator

from configs.algorithm import Algorithm, Critic, Replay, Rollout
from configs.auto import on_gpus, resolve
from configs.base import Own, Section
from configs.data import Data, Model, Reward, Tracking
from configs.environment import Environment
from configs.evaluation import Evaluation, PromptSet, prompt_sets
from configs.infrastructure import Network, Placement, WeightBus
from configs.learner import Checkpoint, LearnerSettings
from configs.limits import Limits
from configs.placement import Share, shares
from configs.teachers import Scoring, Teacher

FLOAT32_ON_GPUS = (
    " Warning: learner.compute_dtype float32 uses no tensor cores, 67 instead of 989 TFLOP/s on an H100, and pads its"
    " attention; master weights and optimizer are float32 anyway, so take 'auto' unless every digit counts."
)


class Run(Section):
    """Identity of the run."""

    name: Own[str] = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder."""
    dir: Own[str] = Field(default="runs", min_length=1)
    """Folder that holds run folders."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the data order, sampling and everything else that is random."""


class Tree(Section):
    """Every section of a configuration, and what follows from them."""

    run: Run = Run()
    model: Model
    data: Data
    reward: Reward = Reward()
    environment: Environment = Environment()
    rollout: Rollout = Rollout()
    replay: Replay = Replay()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    teachers: dict[str, Teacher] = Field(default={})
    """By name: models whose logprobs algorithm.distillation learns from."""
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
    def group_size(self) -> int:
        """Trajectories of a group."""
        return self.learner.facts.answers or self.rollout.group_size

    @property
    def needs_servers(self) -> bool:
        """Whether rollout servers have anything to do: sampling for training, or evaluations."""
        return not self.learner.facts.from_data or self.has_evaluations

    @property
    def replays_routing(self) -> bool:
        """Whether a mixture of experts routes trained tokens as its engine did: every one was sampled then."""
        learner = self.learner
        return self.algorithm.routing_replay and not learner.facts.from_data and learner.sft.data is None

    @property
    def has_evaluations(self) -> bool:
        """Whether some version is evaluated."""
        return any(one.greedy or one.samples for one in self.evaluation_sets)

    @property
    def has_reference(self) -> bool:
        """Whether the learner compares with a reference model."""
        return self.algorithm.kl != "none" or self.learner.facts.has_reference

    @property
    def loss_temperature(self) -> float:
        """Temperature at which the learner takes logprobs: that of sampling, 1 of answers that were not sampled."""
        return 1.0 if self.learner.facts.from_data else self.rollout.temperature

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories in one step."""
        return self.rollout.groups_per_step * self.group_size

    @property
    def min_group(self) -> int:
        """Valid answers that a group trains from."""
        size = self.group_size
        return self.rollout.min_group or max(min(2, size), -(-size // 2))

    @property
    def lease_capacity(self) -> int:
        """Leases that a rollout server holds: its engine's batch, or its episodes, and a quarter, to never run dry."""
        environment, rollout = self.environment, self.rollout
        at_once = rollout.max_running if environment.function is None else environment.max_episodes
        return max(1, -(-5 * at_once // (4 * rollout.group_size)))

    @property
    def learner_nodes(self) -> list[str]:
        """Nodes with learner ranks, the first one with replay and rank 0."""
        return [share.node for share in self.shares if share.learner]

    @property
    def wait_for_learner_s(self) -> float:
        """How long replay waits for a dead learner; a node of several that is away has its time before."""
        away_s = self.placement.give_up_after_s if len(self.learner_nodes) > 1 else 0.0
        return self.replay.wait_for_learner_s + away_s

    @property
    def num_learner_ranks(self) -> int:
        """Ranks of the learner over all nodes, one a device."""
        return sum(len(share.learner) for share in self.shares)

    @property
    def num_data_ranks(self) -> int:
        """Parts of a batch: ranks that compute the same rows (learner.mesh) count once."""
        return self.num_learner_ranks // self.learner.mesh.tensor

    @property
    def longest_trajectory(self) -> int:
        """Tokens of the longest trajectory: the least that a microbatch may have."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def engines_share_gpus(self) -> bool:
        """Whether a GPU has an engine and a learner rank."""
        return any(set(share.rollout) & set(share.learner) for share in self.shares)

    @property
    def staged_by_rank(self) -> bool:
        """Whether each scheduler rank of an engine receives its own slices of an update, and no rank all of it."""
        bus, whole = self.weight_bus, self.weight_bus.delta or self.learner.lora.rank > 0
        return bus.stage_in == "engine" and self.placement.tensor_parallel > 1 and not whole

    @property
    def lane_ends(self) -> tuple[int, int]:
        """Learner ranks that send updates, and scheduler ranks of an engine that receive them (weight_bus/lanes.py).

        (1, 1) where rank 0 sends whole tensors to one place.
        """
        bus = self.weight_bus
        if bus.transport == "disk" or bus.delta or self.learner.lora.rank > 0:
            return 1, 1
        senders = self.num_learner_ranks // self.learner.mesh.replicate
        return senders, self.placement.tensor_parallel if self.staged_by_rank else 1

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

    @property
    def scoring(self) -> Scoring | None:
        """What rollout servers ask of teachers, k by the option of this name; None where they ask none."""
        chosen = self.algorithm.distillation
        asked = {name: teacher for name, teacher in self.teachers.items() if teacher.where == "own"}
        if chosen is None or not asked:
            return None
        k = chosen.options.get("k", 0)
        return Scoring(asked, k if type(k) is int else 0)  # its own package refuses what is no number

    @property
    def evaluation_sets(self) -> tuple[PromptSet, ...]:
        """What is evaluated, in the order of data.eval; empty where nothing is."""
        if self.data.eval is None or self.evaluation.every_steps == 0:
            return ()
        rollout = self.rollout
        return prompt_sets(
            self.data.eval, self.evaluation, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
        )

    @property
    def max_context(self) -> int:
        """Tokens of the longest prompt and the longest answer, of training and of evaluations."""
        answers = [self.rollout.max_new_tokens, *(one.max_new_tokens for one in self.evaluation_sets)]
        return self.data.max_prompt_tokens + max(answers)

    @property
    def scored_context(self) -> int:
        """Tokens of the longest prompt and answer that a teacher scores; its `context` may double the prompt."""
        has_context = any(teacher.context is not None for teacher in self.teachers.values())
        return self.max_context + (self.data.max_prompt_tokens if has_context else 0)

    def is_evaluated(self, version: int) -> bool:
        """Whether this policy version is evaluated."""
        if not self.has_evaluations:
            return False
        return version % self.evaluation.every_steps == 0 or version == self.learner.total_steps

    def arithmetic(self) -> str:
        """The run's arithmetic and what `auto` has become, printed at start."""
        rollout, ranks, together = self.rollout, self.num_data_ranks, self.learner.mesh.tensor
        rank, here = self.learner.lora.rank, self.with_workers()
        adapters = f" (adapters of rank {rank})" if rank else ""
        per_rank = f"{self.trajectories_per_step / ranks:.4g}"
        many = "s" if ranks > 1 else ""
        parts, epochs = self.learner.minibatches, self.learner.epochs
        updates = "one update" if parts * epochs == 1 else f"updates of {parts} mini-batches × {epochs} epochs"
        places = f"learner rank{many}" if together == 1 else f"group{many} of {together} learner ranks"
        kernels = ", deterministic kernels" if self.learner.deterministic else ""
        in_float32 = self.learner.compute_dtype == "float32" and on_gpus(self.placement.model_dump())
        numerics = f"{self.learner.compute_dtype}{adapters}{kernels}"
        warning = FLOAT32_ON_GPUS if in_float32 else ""
        each = (
            f" = {self.trajectories_per_step} trajectories a step → {per_rank} on each of {ranks} {places},"
            f" microbatches of at most {self.learner.max_tokens_per_microbatch} tokens"
        )
        if self.learner.facts.from_data:
            return (
                f"{rollout.groups_per_step} rows × {self.group_size}{each}. {self.learner.total_steps} steps of"
                f" {self.learner.objective}, {updates} each, from data.train; no answer is sampled for training."
                f" Learner: {numerics}.{warning}"
            )
        return (
            f"{rollout.groups_per_step} prompts × {rollout.group_size}{each}; lag ≤ {self.replay.async_lag} → at most"
            f" {self.max_groups_in_flight} groups in flight, the batch in training included."
            f" {self.learner.total_steps} steps, {updates} and one weight broadcast each, to"
            f" {self.num_rollout_servers} rollout server{'s' if self.num_rollout_servers > 1 else ''}."
            f" Reward: {self.reward.shown}; a server on this machine has {here.reward.workers} reward and"
            f" {here.environment.workers} environment processes."
            f" Rollouts: {rollout.engine}, {rollout.dtype}; learner: {numerics};"
            f" weights over {self.weight_bus.medium}.{warning}"
        )

    @property
    def shares(self) -> tuple[Share, ...]:
        """Devices by node, the first learner node first."""
        return shares(self.placement, [place for one in self.teachers.values() for place in one.processes])

    def with_workers(self) -> Self:
        """With numbers of reward and environment processes for this machine and the most servers of a node."""
        servers = max(1, *(len(share.engines(self.placement.tensor_parallel)) for share in self.shares))
        changed = {
            name: section.model_copy(update={"workers": section.num_workers(servers)})
            for name, section in (("reward", self.reward), ("environment", self.environment))
        }
        return self.model_copy(update=changed)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_resolved(cls, tree: object) -> object:
        return resolve(tree) if isinstance(tree, dict) else tree
