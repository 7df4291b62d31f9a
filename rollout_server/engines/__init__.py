"""Engines, chosen once by name."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from configs.schema import Config
from replay.channel.interfaces import InterfaceError, bind_collectives
from rollout_server.engines.base import Completion, Engine, EngineError, EngineStartFailed, Health, Partial, Sampling

if TYPE_CHECKING:
    from rollout_server.engines.sglang.receiver_link import SGLangStaging


def _torch(config: Config) -> Engine:
    from rollout_server.engines.torch.engine import TorchEngine

    return TorchEngine(
        config.model.path,
        max_context=config.max_context,
        max_running=config.rollout.max_running,
        dtype=config.rollout.dtype,
        num_threads=config.rollout.num_threads,
        seed=config.run.seed,
        lora=config.learner.lora if config.learner.lora.rank else None,
        routing=config.replays_routing,
        scored_context=config.scored_context,
    )


def _sglang(config: Config) -> Engine:
    from rollout_server.engines.sglang.engine import SGLangEngine

    return SGLangEngine(config)


Builders = Mapping[str, Callable[[Config], Engine]]
BUILDERS: Builders = {"torch": _torch, "sglang": _sglang}


def build_engine(config: Config, builders: Builders = BUILDERS) -> Engine:
    """The engine that `rollout.engine` names, with the weights of `model.path` as version 0.

    SGLang needs the running event loop on which it will be used, and blocks it until it serves.

    Raises EngineError where the model folder cannot be served, the engine's package is not installed, or no interface
    has the address of network.host; EngineStartFailed where SGLang did not start.
    """
    # What the engine's processes inherit, where they are members of the bus's group.
    if config.weight_bus.stage_in == "engine":
        try:
            bind_collectives(os.environ, config.network.host)
        except InterfaceError as error:
            raise EngineError(str(error)) from error
        if config.weight_bus.on_gpus:
            from weight_bus.transports import set_nccl_defaults

            set_nccl_defaults(config.weight_bus)
    return builders[config.rollout.engine](config)


def of_teacher(config: Config, name: str) -> Config:
    """The configuration that the engine of a teacher is built with: its own folder, and nothing that trains."""
    from rollout_server.engines.sglang.requests import SCORED_AT

    if config.rollout.facts.has_processes:  # which inherit it
        os.environ[SCORED_AT] = repr(config.rollout.temperature)
    path = config.teachers[name].path
    changed = {
        "algorithm": config.algorithm.model_copy(update={"routing_replay": False}),
        "weight_bus": config.weight_bus.of_teacher(name),
        "rollout": config.rollout.model_copy(update={"on_new_weights": "drain"}),  # a score is of one version
    }
    if path is not None:
        changed["model"] = config.model.model_copy(update={"path": path})
        whole = config.learner.lora.model_copy(update={"rank": 0})
        changed["learner"] = config.learner.model_copy(update={"lora": whole})
    return config.model_copy(update=changed)


def staging_in(config: Config, engine: Engine) -> "SGLangStaging | None":
    """The engine's receiver with weight_bus.stage_in `engine`; None otherwise. Raises EngineError."""
    if config.weight_bus.stage_in == "server":
        return None
    broadcast_s, engine_s = config.weight_bus.collective_timeout_s, config.rollout.engine_deadline_s
    if broadcast_s >= engine_s:
        raise EngineError(
            f"weight_bus.stage_in: 'engine' with weight_bus.collective_timeout_s {broadcast_s:g}, which is not below"
            f" rollout.engine_deadline_s {engine_s:g}: a broadcast that hangs may hold the engine up for as long, and"
            " it would be taken for dead; lower the one or raise the other"
        )
    from rollout_server.engines.sglang.engine import SGLangEngine
    from rollout_server.engines.sglang.receiver_link import SGLangStaging

    assert isinstance(engine, SGLangEngine), "the configuration refuses others"
    return SGLangStaging(config, engine)
