"""What TRL's arguments and our configuration must agree on, so that one update of TRL trains exactly one batch. Pure.

TRL's data loader asks for one microbatch more than an update takes, before the update. Replay gives batch s+1 out only
once step s is committed, so each update has one microbatch more than the batch fills, and that one teaches nothing
(examples/trl/samples.py). `gradient_accumulation_steps` counts it.
"""

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.loading import dump, parse
from configs.schema import Config
from learner.advantages import need_tokens

READ_AHEAD = 1
"""Microbatches that TRL's data loader (accelerate's) asks for before the update that they are not part of."""


class TrlDisagrees(ConfigError, code="SLIP-CONFIG-13"):
    """TRL's trainer and the configuration do not agree."""


def trl_arguments(config: Config, *, per_device_train_batch_size: int, processes: int = 1) -> dict[str, Any]:
    """Arguments for TRL's AsyncGRPOConfig that say what the configuration says.

    Args:
        config: of the rollouts; learner.total_steps becomes max_steps.
        per_device_train_batch_size: samples of one forward on one process of TRL.
        processes: of TRL, as `accelerate launch` starts them.

    Raises:
        ConfigError: the samples of a batch are no multiple of those of a microbatch.
    """
    microbatch = per_device_train_batch_size * processes
    samples = config.rollout.groups_per_step * config.rollout.group_size
    if microbatch < 1 or samples % microbatch:
        raise TrlDisagrees(
            f"per_device_train_batch_size: {per_device_train_batch_size} on {processes} processes does not divide"
            f" rollout.groups_per_step × rollout.group_size = {samples} samples; take a divisor of {samples}"
        )
    return {
        "max_steps": config.learner.total_steps,
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": samples // microbatch + READ_AHEAD,
        "max_staleness": config.replay.async_lag,
        **_the_same(config),
    }


def agreed(config: Config, args: Any) -> Config:
    """The configuration as a run under TRL has it, once it agrees with TRL's arguments (an AsyncGRPOConfig).

    TRL says how many updates there are. Trajectories of zero advantage stay in the batch, as TRL's own worker leaves
    them in, and TRL evaluates.

    Raises:
        ConfigError: with every disagreement, one a line; or the configuration needs what TRL has no place for.
    """
    if args.max_steps < 1:
        raise TrlDisagrees(f"max_steps: {args.max_steps}; give TRL the number of updates, such as max_steps=100")
    overrides = [
        f"learner.total_steps={args.max_steps}",
        "algorithm.drop_zero_advantage=false",
        "evaluation.every_steps=0",
    ]
    config = parse(dump(config), "the configuration for TRL", overrides)
    expected = trl_arguments(
        config, per_device_train_batch_size=args.per_device_train_batch_size, processes=args.world_size
    )
    problems = [
        f"TRL's {name} is {getattr(args, name)!r}, the configuration says {value!r}"
        for name, value in expected.items()
        if name != "max_staleness" and getattr(args, name) != value
    ]
    if args.max_staleness < config.replay.async_lag:
        problems.append(
            f"TRL's max_staleness is {args.max_staleness}, less than replay.async_lag {config.replay.async_lag}: TRL"
            " would drop samples that replay counts as trained"
        )
    if problems:
        raise TrlDisagrees("\n".join([*problems, "take AsyncGRPOConfig(..., **trl_arguments(config, ...))"]))
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError: the configuration needs what TRL's trainer has no place for."""
    if need_tokens(config.algorithm):
        raise TrlDisagrees(
            f"algorithm.advantage: {config.algorithm.advantage.name!r} (kl_in {config.algorithm.kl_in!r}) follows from"
            " forwards over the tokens, and TRL takes one number for each answer; take 'grpo', and kl_in 'loss'"
        )
    if rank := config.learner.lora.rank:
        raise TrlDisagrees(
            f"learner.lora.rank: {rank}, so that engines would wait for adapters, and TRL sends whole weights,"
            " adapters of its own (peft_config) merged: take learner.lora.rank=0"
        )
    if (ranks := config.num_learner_ranks) != 1:
        raise TrlDisagrees(
            f"placement: {ranks} learner ranks; TRL divides the batch over its own processes and is one rank for"
            ' replay: take placement.split "N:1", or one device in placement.learner, and no critic nor reference there'
        )


def _the_same(config: Config) -> Mapping[str, Any]:
    """TRL's arguments that state what rollout servers do, or keep an update and a version one."""
    return {
        "num_generations": config.rollout.group_size,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "token_budget": 0,
        "weight_sync_steps": 1,
    }
