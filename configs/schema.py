"""The whole configuration: one pydantic tree, cross-checked before any process starts.

`Config` is the only source of defaults. Cross-field checks live here, so that a run that cannot work or
would be silently wrong is refused with the key, the value and a way out.
"""

import ipaddress
import itertools
from collections.abc import Iterator

from pydantic import model_validator

from configs.auto import STAGING_BACKENDS
from configs.engines import ENGINES
from configs.evaluation import check as check_sets
from configs.evaluation import check_metric
from configs.placement import check
from configs.teachers import problems
from configs.tree import Tree

MAX_ASYNC_LAG = 8


class Config(Tree):
    """One run of Slipstream. Properties are derived, never set."""

    @model_validator(mode="after")
    def _is_possible(self) -> "Config":
        """Raises ValueError with the first thing that a check has found."""
        checks = (
            *(self._placed, self._trained, self._sampled, self._algorithm_holds, self._taught, self._kept),
            self._connected,
        )
        for problem in itertools.chain.from_iterable(found() for found in checks):
            raise ValueError(problem)
        return self

    def _placed(self) -> Iterator[str]:
        check(self.placement, needs_servers=self.needs_servers)
        if self.engines_share_gpus and self.weight_bus.on_gpus:
            yield (
                "placement.share_gpus: true with weight_bus.backend 'nccl', which refuses two processes of a group on"
                " one GPU; take weight_bus.backend=gloo"
            )
        if self.placement.tensor_parallel > 1 and not self.rollout.facts.has_processes:
            yield (
                f"placement.tensor_parallel: {self.placement.tensor_parallel} with rollout.engine"
                f" {self.rollout.engine!r}, which is on one device; take 1, or rollout.engine=sglang"
            )
        mesh, ranks = self.learner.mesh, self.num_learner_ranks
        if ranks % mesh.size:
            yield (
                f"learner.mesh: {mesh} = {mesh.size} does not divide the {ranks} learner"
                f" rank{'s' if ranks > 1 else ''} of the placement; take other sizes, or give the learner a multiple of"
                f" {mesh.size} devices"
            )
        if self.learner.compile and mesh.tensor > 1:
            yield (
                f"learner.compile: true with learner.mesh.tensor {mesh.tensor}: torch's compiler does not take rows of"
                " any length through DTensor (RecursionError in torch 2.13); take learner.compile=false"
            )
        for share in self.shares:
            if len(share.learner) % mesh.tensor:
                yield (
                    f"learner.mesh.tensor: {mesh.tensor} ranks that compute each layer together must be of one node,"
                    f" and {share.node} has {len(share.learner)} learner devices; give it a multiple of {mesh.tensor}"
                )

    def _trained(self) -> Iterator[str]:
        if self.learner.offload_activations and self.learner.recompute not in ("full", "auto"):
            yield (
                f"learner.offload_activations: true with learner.recompute {self.learner.recompute!r}; take"
                " learner.recompute=full"
            )
        if self.learner.offload_activations and self.learner.compile:  # saves weights among its inputs as well
            yield "learner.offload_activations: true with learner.compile True; take learner.compile=false"
        if rank := self.learner.lora.rank:
            if self.learner.mesh.tensor > 1:
                yield (
                    f"learner.lora.rank: {rank} with learner.mesh.tensor {self.learner.mesh.tensor}: adapters are not"
                    " divided over tensor ranks; take learner.mesh.tensor=1"
                )
            if self.rollout.dtype != self.learner.compute_dtype:
                yield (
                    f"learner.lora.rank: {rank} with rollout.dtype {self.rollout.dtype!r} and learner.compute_dtype"
                    f" {self.learner.compute_dtype!r}: both ends hold the same frozen weights, which digests prove, and"
                    " so have one dtype; set one to the other, or both to auto"
                )
        patience, bus = self.learner.collective_deadline_s, self.weight_bus.deadline_s
        if patience <= bus and self.num_learner_ranks > 1:
            yield (
                f"learner.collective_deadline_s: {patience:g} is not above weight_bus.deadline_s {bus:g}, for which"
                f" rank 0 may wait while the others are in a collective; take {2 * bus:g} or more"
            )

    def _sampled(self) -> Iterator[str]:
        ranks, groups, parts = self.num_data_ranks, self.rollout.groups_per_step, self.learner.minibatches
        size = 1 if self.learner.facts.compares else self.group_size
        if (each := groups // parts * size) < ranks:
            least = -(-ranks // size) * parts
            yield (
                f"rollout.groups_per_step: {groups} groups × rollout.group_size {size} in"
                f" learner.minibatches {parts} are {each} trajectories an update, fewer than {ranks} learner ranks;"
                f" take {least} groups or more, fewer mini-batches, or another placement.split"
            )
        if self.learner.target_kl and self.learner.updates_per_step == 1:
            yield (
                f"learner.target_kl: {self.learner.target_kl:g} ends a step's updates, and a step makes one; raise"
                " learner.minibatches or learner.epochs, or take target_kl=0"
            )
        if self.min_group > self.rollout.group_size:
            yield (
                f"rollout.min_group: {self.min_group} is more than the answers of a group, rollout.group_size"
                f" {self.rollout.group_size}; take fewer"
            )
        given, longest = self.learner.max_tokens_per_microbatch, self.longest_trajectory
        if longest > given:
            yield (
                f"learner.max_tokens_per_microbatch: {given} is less than one trajectory of data.max_prompt_tokens +"
                f" rollout.max_new_tokens = {longest} tokens; raise it to {longest} or more"
            )
        elif self.learner.facts.compares and (whole := self.group_size * longest) > given:
            yield (
                f"learner.max_tokens_per_microbatch: {given} is less than the {whole} tokens of {self.group_size}"
                f" answers that are compared, each of up to {longest} with its prompt; raise it to {whole} or more"
            )
        yield from self._episodes()
        yield from self._from_data()
        yield from self._beside()

    def _beside(self) -> Iterator[str]:
        """What does not go with learner.sft, whose rows are in the batches of sampled answers."""
        learner, temperature = self.learner, self.rollout.temperature
        others = {
            f"learner.objective: {learner.objective}": learner.facts.from_data,
            f"rollout.temperature: {temperature:g}": temperature != 1,
            f"learner.minibatches × learner.epochs: {learner.updates_per_step}": learner.updates_per_step > 1,
            "teachers": bool(self.teachers),
        }
        for what in (what for what, is_so in others.items() if is_so and learner.sft.data is not None):
            yield (
                f"learner.sft.data: {learner.sft.data!r} with {what}; the term goes with objective rl, temperature 1,"
                " one update a step and no teachers: take those, or leave learner.sft out"
            )

    def _from_data(self) -> Iterator[str]:
        """What speaks of sampled answers has nothing to act on."""
        if not self.learner.facts.from_data:
            if self.data.held_out is not None:
                yield "data.held_out: goes with learner.objective sft or dpo; take one of them, or leave it out"
            return
        algorithm, default = self.algorithm, type(self.algorithm)()
        unused = ["dynamic_sampling", "kl", "entropy_coef", "overlong_buffer", "overlong_filter", "distillation"]
        given = [f"algorithm.{name}" for name in unused if getattr(algorithm, name) != getattr(default, name)]
        given += ["algorithm.reference_refresh_steps"] * (algorithm.reference_refresh_steps > 0)
        given += ["learner.target_kl"] * (self.learner.target_kl > 0)
        given += ["data.curriculum"] * (self.data.curriculum == "pass_rate") + ["teachers"] * bool(self.teachers)
        if given:
            yield (
                f"{given[0]}: is about sampled answers, and learner.objective {self.learner.objective} learns from"
                " those in data.train; leave it out"
            )

    def _episodes(self) -> Iterator[str]:
        environment, replay = self.environment, self.replay
        if environment.function is None:
            if any(part.spec == "environment" for part in self.reward.parts):
                yield (
                    "reward.function: 'environment' without environment.function, which would give the reward; name one"
                )
            return
        if replay.partial_rollouts:
            yield (
                "replay.partial_rollouts: true with environment.function: another server could go on from the tokens of"
                " an episode, but not from the state of its environment; take replay.partial_rollouts=false"
            )
        if environment.turn_timeout_s >= replay.lease_s:
            yield (
                f"environment.turn_timeout_s: {environment.turn_timeout_s:g} is not below replay.lease_s"
                f" {replay.lease_s:g}: a lease without a new token for that long goes to another server; raise"
                " replay.lease_s, or take a shorter turn"
            )

    def _algorithm_holds(self) -> Iterator[str]:
        lag = self.replay.async_lag
        if lag > MAX_ASYNC_LAG:
            yield (
                f"replay.async_lag: {lag} is above {MAX_ASYNC_LAG}, past which no correction held in measurement;"
                f" take {MAX_ASYNC_LAG} or less"
            )
        if lag == 0 and self.replay.on_stale == "substitute":
            yield (
                "replay.on_stale: 'substitute' at replay.async_lag 0, where no group is ahead to take another one's"
                " place; take 'wait', or an async_lag of 1 or more"
            )
        if lag == 0 and self.rollout.on_new_weights not in ("auto", "drain"):
            yield (
                f"rollout.on_new_weights: {self.rollout.on_new_weights!r} at replay.async_lag 0; synchronous training"
                " drains, so take 'auto' or 'drain'"
            )
        algorithm = self.algorithm
        if not self.has_reference and (algorithm.reference_path is not None or algorithm.reference_refresh_steps):
            key = "reference_path" if algorithm.reference_path is not None else "reference_refresh_steps"
            yield (
                f"algorithm.{key}: nothing uses a reference model; set algorithm.kl to k2 or k3, take"
                " learner.objective=dpo, or leave it out"
            )
        buffer, longest = algorithm.overlong_buffer, self.rollout.max_new_tokens
        if buffer > longest:
            yield (
                f"algorithm.overlong_buffer: {buffer} tokens are more than rollout.max_new_tokens {longest}, so every"
                f" answer would be punished for its length; take less than {longest}, such as {max(1, longest // 4)}"
            )

    def _taught(self) -> Iterator[str]:
        yield from problems(self.teachers, is_used=self.algorithm.distillation is not None)
        places = {(share.node, device) for share in self.shares for device in (*share.rollout, *share.learner)}
        for name, teacher in self.teachers.items():
            wanted = [(node, device) for node, devices in teacher.processes for device in devices]
            if (both := sorted(places.intersection(wanted))) and not self.placement.share_gpus:
                yield (
                    f"teachers.{name}.devices: {both[0][0]}:{both[0][1]} is given to others as well; take another one,"
                    " or set placement.share_gpus=true"
                )
            if len(set(wanted)) < len(wanted):
                yield f"teachers.{name}.devices: {teacher.devices!r} names a device twice; name each once"
            places |= set(wanted)
        if (scoring := self.scoring) is None:
            return
        most = max(self.rollout.group_size, -(-self.trajectories_per_step // self.num_data_ranks))
        size = 8 * scoring.k * most * self.rollout.max_new_tokens
        if size > (limit := self.network.max_message_bytes):
            yield (
                f"network.max_message_bytes: {limit} is less than the {size} bytes of teachers' top {scoring.k} for"
                f" {most} of the longest answers, a rank's part of a step; raise it, or take a smaller k"
            )

    def _kept(self) -> Iterator[str]:
        if self.replay.async_lag == 0 and (named := self.limits.guards_that("lower_lag")):
            yield (
                f"limits.{named[0]}: lower_lag with replay.async_lag 0, where there is no lag to lower; take skip or"
                " stop"
            )
        if self.checkpoint.every_steps == 0 and (named := self.limits.guards_that("roll_back")):
            yield (
                f"limits.{named[0]}: roll_back with checkpoint.every_steps 0, where there is no checkpoint to go back"
                " to; take checkpoint.every_steps=50, or stop"
            )
        steps = self.tracking.profiled
        if steps and steps.start > self.learner.total_steps:
            yield (
                f"tracking.profile: {self.tracking.profile} begins after the last step, learner.total_steps is"
                f" {self.learner.total_steps}; give steps that the run has"
            )
        check_sets(self.evaluation_sets, self.evaluation)
        if self.learner.total_steps == 0 and not self.is_evaluated(0):
            yield (
                "learner.total_steps: 0 evaluates the model and trains nothing, but nothing is evaluated; set data.eval"
                " and evaluation.every_steps, or give steps"
            )
        checkpoint, every = self.checkpoint, self.evaluation.every_steps
        if checkpoint.keep_best and checkpoint.best_metric is None:
            yield (
                f"checkpoint.keep_best: {checkpoint.keep_best} without checkpoint.best_metric; name what evaluations"
                " measure, such as val-core/gsm8k/greedy, or take keep_best=0"
            )
        elif checkpoint.keep_best and checkpoint.best_metric is not None:
            check_metric(self.evaluation_sets, checkpoint.best_metric)
        if checkpoint.keep_best and (not self.is_evaluated(self.learner.total_steps) or checkpoint.every_steps % every):
            yield (
                f"checkpoint.keep_best: {checkpoint.keep_best} keeps what was evaluated, and of the checkpoints every"
                f" {checkpoint.every_steps} steps not all are (evaluation.every_steps {every}); evaluate data.eval, and"
                " make checkpoint.every_steps a multiple of evaluation.every_steps"
            )

    def _connected(self) -> Iterator[str]:
        bus, network, prometheus = self.weight_bus, self.network, self.tracking.prometheus
        if bus.transport == "disk" and bus.folder is None:
            yield "weight_bus.transport: 'disk' needs weight_bus.folder, which all nodes see"
        needed = {
            "weight_bus.transport": (bus.transport, ("collective",)),
            "weight_bus.backend": (
                bus.backend,
                STAGING_BACKENDS if self.placement.tensor_parallel == 1 or self.staged_by_rank else ("nccl",),
            ),
            "rollout.engine": (self.rollout.engine, tuple(name for name, its in ENGINES.items() if its.has_processes)),
        }
        for key, (value, possible) in needed.items() if bus.stage_in == "engine" else ():
            if value not in possible:
                yield (
                    f"weight_bus.stage_in: 'engine' with {key} {value!r} and placement.tensor_parallel"
                    f" {self.placement.tensor_parallel}; take weight_bus.stage_in=server, or"
                    f" {key}={' or '.join(possible)}"
                )
        if bus.compression != "none" and (not bus.delta or bus.on_gpus):
            why = "is of what weight_bus.delta sends" if not bus.delta else "works on host memory, and nccl on GPUs"
            yield f"weight_bus.compression: {bus.compression!r} {why}; take compression=none, or change that"
        if not is_loopback(network.host) and network.keys is None and not network.insecure:
            yield (
                f"network.host: {network.host!r} leaves the loopback interface and no keys are configured;"
                " bind 127.0.0.1, make keys (python -m replay.keys --out keys) and set network.keys=keys, or set"
                " network.insecure=true on a network that you trust"
            )
        if prometheus is not None and not is_loopback(prometheus) and not network.insecure:
            yield (
                f"tracking.prometheus: {prometheus!r} leaves the loopback interface, and whoever reaches it reads the"
                " run's numbers; take 127.0.0.1 with a collector on each machine, or set network.insecure=true on a"
                " network that you trust"
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
