"""Values that are made of several settings: of each name, what its value means here, from the whole file."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from slipstream.translate.judges import JUDGES
from slipstream.translate.names import TABLES
from slipstream.translate.settings import Foreign, Line

NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""What the name of a run or of a dataset cannot have."""
VALUES: Mapping[str, Mapping[Any, Any]] = TABLES["values"]


Convert = Callable[[str, Any, Foreign], Line]


def _as(keys: Callable[[Any], dict[str, Any]], note: str = "") -> Convert:
    """What the value alone says."""
    return lambda shown, value, _: Line(shown, "key", keys(value), note)


def _divided(key: str, by: tuple[str, ...], default: int, why: str) -> Convert:
    """By another setting; `why` says what is open where that leaves a rest."""

    def convert(shown: str, value: Any, foreign: Foreign) -> Line:
        size = foreign.value(*by, default=default)
        if not isinstance(value, int) or not isinstance(size, int) or value % size:
            return Line(shown, "open", note=why.format(value=value, size=size), decides=key)
        return Line(shown, "key", {key: value // size})

    return convert


def _answers(*by: str, default: int) -> Convert:
    return _divided("rollout.groups_per_step", by, default, "{value} answers are no whole groups of {size}")


def _prompts(key: str) -> Convert:
    def convert(shown: str, value: Any, foreign: Foreign) -> Line:
        if foreign.framework == "slime" and isinstance(value, list) and len(value) % 2 == 0:
            return Line(shown, "key", {key: dict(zip(value[::2], value[1::2], strict=True))})
        if not isinstance(value, list):
            return Line(shown, "key", {key: str(value)})
        paths = [str(path) for path in value]
        if len(paths) == 1:
            return Line(shown, "key", {key: paths[0]})
        names = [PurePosixPath(path).parent.name or PurePosixPath(path).stem for path in paths]
        if len(set(names)) < len(paths):
            names = [NO_NAME.sub("-", path.rpartition(".")[0] or path).strip("-._") for path in paths]
        return Line(shown, "key", {key: dict(zip(names, paths, strict=True))})

    return convert


def _betas(shown: str, value: Any, foreign: Foreign) -> Line:
    if not isinstance(value, list):
        first = foreign.value("adam_beta1", "betas1", "optimizer.beta1", default=0.9)
        value = [first, foreign.value("adam_beta2", "betas2", "optimizer.beta2", default=0.999)]
    return Line(shown, "key", {"learner.betas": value})


def _undivided(shown: str, value: Any, foreign: Foreign) -> Line:
    """Whether the deviation divides is a setting of its own there, and a name of an advantage here."""
    is_divided = value if "norm_adv" in shown else not value
    is_grpo = foreign.value("adv_estimator", "advantage_estimator", default="grpo") == "grpo"
    if is_divided or not is_grpo:
        return Line(shown, "not needed", note="as the estimator of advantages says")
    return Line(shown, "key", {"algorithm.advantage": "dr_grpo"}, "without the deviation")


def _advantage(shown: str, value: Any, foreign: Foreign) -> Line:
    undivided = foreign.value("norm_adv_by_std_in_grpo", default=True) is False or foreign.value(
        "disable_grpo_std_normalization", default=False
    )
    return Line(shown, "key", {"algorithm.advantage": "dr_grpo" if value == "grpo" and undivided else value})


def _is_old(foreign: Foreign) -> bool:
    """Whether a file is of prime-rl up to v0.5."""
    return any(
        one.name.startswith(("orchestrator.env.", "orchestrator.sampling.")) or one.name.endswith("max_async_level")
        for one in foreign.settings
    )


def _lag_of_prime(shown: str, value: Any, foreign: Foreign) -> Line:
    """Up to v0.5 it bounds one answer, and `max_async_level` how far rollouts are ahead."""
    if not _is_old(foreign):
        return Line(shown, "key", {"replay.async_lag": value})
    level = foreign.value("max_async_level", default=1)
    return Line(shown, "key", {"replay.async_lag": level}, f"max_async_level is {level}, which bounds every token here")


def _loss_of_prime(shown: str, value: Any, foreign: Foreign) -> Line:
    if value != "default":
        return Line(shown, "key", {"algorithm.loss": value})
    older = "the nearest: v0.5 masks in both directions, and before that ratios outside of 0.125 to 8"
    return Line(shown, "key", {"algorithm.loss": "dppo_tv"}, older if _is_old(foreign) else "")


def _flat_of_prime(shown: str, value: Any, foreign: Foreign) -> Line:
    if not _is_old(foreign):
        return Line(shown, "not needed", note="left out there and here")
    return Line(shown, "key", {"algorithm.drop_zero_advantage": False})


def _lag_of_verl(shown: str, value: Any, foreign: Foreign) -> Line:
    """A file of one_step_off_policy has GPUs of rollouts beside the trainer's."""
    is_apart = any(one.name == "rollout.n_gpus_per_node" for one in foreign.settings)
    return Line(shown, "key", {"replay.async_lag": int(is_apart)}, "1 lets both sides work at once")


def _threshold(shown: str, value: Any, foreign: Foreign) -> Line:
    """Of the weights, whose kind is another setting."""
    kind = VALUES["rollout_is"].get(foreign.value("rollout_is"))
    if not isinstance(kind, dict) or not isinstance(value, int | float):
        return Line(shown, "not needed", note="no correction there")
    return Line(shown, "key", {f"algorithm.correction.{kind['algorithm.correction']}.high": value})


def _steps(key: str) -> Convert:
    """TRL counts updates, of which one batch of rollouts can have several."""

    def convert(shown: str, value: Any, foreign: Foreign) -> Line:
        if foreign.framework != "TRL":
            return Line(shown, "key", {key: value})
        batches = foreign.value("steps_per_generation") or foreign.value("gradient_accumulation_steps", default=1)
        size = foreign.value("gradient_accumulation_steps", default=1)
        updates = _times(batches, foreign.value("num_iterations", default=1))
        if updates is None or not isinstance(value, int) or not isinstance(size, int) or updates < size:
            return Line(shown, "open", note="updates there, batches of rollouts here", decides=key)
        note = f"{updates / size:g} updates a step" if updates != size else ""
        return Line(shown, "key", {key: math.ceil(value * size / updates)}, note)

    return convert


def _size_of_trl(shown: str, value: Any, foreign: Foreign) -> Line:
    """Of one device, whose number the file does not say; a resolved file has the product."""
    if foreign.value("generation_batch_size"):
        return Line(shown, "not needed", note="generation_batch_size and steps_per_generation decide")
    why = "counted in answers there, in groups of rollout.group_size here"
    return Line(shown, "open", note=why, decides="rollout.groups_per_step")


MODES = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mis",
}
"""Of TRL's correction of vLLM's logprobs."""


def _correction_of_trl(shown: str, value: Any, foreign: Foreign) -> Line:
    """One correction from its switch, mode and bounds; a lower bound is one of the masks alone."""
    switch, start = "vllm_importance_sampling_correction", "vllm_importance_sampling_"
    if not foreign.is_on("use_vllm") or not foreign.value(switch, default=True):
        return Line(shown, "not needed", note="no correction there")
    kind = MODES.get(foreign.value(f"{start}mode", default="sequence_mask"))
    high = foreign.value(f"{start}clip_max", f"{start}cap", default=3.0)
    low = foreign.value(f"{start}clip_min")
    if kind is None or high is None or (low is not None and kind.endswith("tis")):
        return Line(shown, "open", note="neither such a mode nor such bounds are here", decides="algorithm.correction")
    bounds = {"high": high} if kind.endswith("tis") else {"low": low or 0.0, "high": high}
    return Line(shown, "key", {"algorithm.proximal": "current", "algorithm.correction": {kind: bounds}})


def _kl_of_areal(shown: str, value: Any, foreign: Foreign) -> Line:
    if not value:
        return Line(shown, "not needed", note="no KL term")
    estimator = foreign.value("kl_estimator", default="k1")
    return Line(shown, "key", {"algorithm.kl": estimator, "algorithm.kl_in": "reward", "algorithm.kl_coef": value})


def _reference_of_areal(shown: str, value: Any, foreign: Foreign) -> Line:
    if not foreign.value("actor.kl_ctl", default=0.1):
        return Line(shown, "not needed", note="no KL term")
    return Line(shown, "key", {"algorithm.reference_path": value})


def _trackers(shown: str, value: Any, foreign: Foreign) -> Line:
    names = ["wandb"] if value is True else [str(one) for one in (value if isinstance(value, list) else [value])]
    kept = [one for one in names if one != "console"]
    return Line(shown, "key", {"tracking.trackers": kept}, "the terminal shows every step" if kept != names else "")


def _updates(shown: str, value: Any, foreign: Foreign) -> Line:
    """Optimizer updates a step from the size of one, in prompts (verl) or answers (slime)."""
    key = "learner.minibatches"
    sampled = foreign.value("rollout_batch_size", "data.train_batch_size", default=1024)
    if foreign.framework == "slime":
        sampled = _times(sampled, foreign.value("n_samples_per_prompt", default=1))
    if "trigger_parameter_sync_step" in shown or foreign.value("trigger_parameter_sync_step") is not None:
        return Line(shown, "not needed", note="a step is all that is sampled for one version, as groups_per_step says")
    if not isinstance(sampled, int) or not isinstance(value, int) or value < 1 or sampled % value:
        return Line(shown, "open", note=f"{value} does not divide the {sampled} of a step", decides=key)
    return Line(shown, "key", {key: sampled // value})


def _updates_of_critic(shown: str, value: Any, foreign: Foreign) -> Line:
    """There each over a mini-batch of its own."""
    size = foreign.value("critic.ppo_mini_batch_size", "actor.ppo_mini_batch_size", default=256)
    sampled = foreign.value("data.train_batch_size", default=1024)
    if not has_critic(foreign):
        return Line(shown, "not needed", note="grpo has no critic")
    if _times(value, size, sampled) is None or size < 1 or sampled % size:
        return Line(shown, "open", note=f"{size} does not divide the {sampled} of a step", decides="critic.updates")
    return Line(shown, "key", {"critic.updates": value * sampled // size}, "each over the whole batch here")


def has_critic(foreign: Foreign) -> bool:
    default = TABLES["defaults"][foreign.framework].get("algorithm.adv_estimator", "grpo")
    return foreign.value("adv_estimator", "advantage_estimator", default=default) in ("gae", "ppo")


def _synced(shown: str, value: Any, foreign: Foreign) -> Line:
    """verl's fully_async: what is sampled for one version is one step here."""
    rounds, size = foreign.value("require_batches", default=1), foreign.value("ppo_mini_batch_size", default=256)
    groups, rows = _times(value, rounds, size), foreign.value("total_rollout_steps")
    if groups is None:
        return Line(shown, "open", note="not a number", decides="rollout.groups_per_step")
    pairs = {"rollout.groups_per_step": groups, "learner.minibatches": _times(value, rounds)}
    if isinstance(rows, int):
        pairs["learner.total_steps"] = rows // groups
    return Line(shown, "key", pairs, "what is sampled for one version is one step")


def _times(*factors: Any) -> int | None:
    return math.prod(factors) if all(isinstance(factor, int) for factor in factors) else None


def _split(shown: str, value: Any, foreign: Foreign) -> Line:
    """Of GPUs that each serve one side, on one node."""
    rollout, learner, nodes = SIDES.get(foreign.framework, ("", "", ()))
    both = foreign.value(rollout), foreign.value(learner)
    is_one_node = all(foreign.value(name, default=1) == 1 for name in nodes)
    if is_one_node and not foreign.is_on("colocate") and all(isinstance(side, int) and side > 0 for side in both):
        return Line(shown, "key", {"placement.split": f"{both[0]}:{both[1]}"})
    why = "which GPUs serve rollouts and which the learner is a choice here; `slipstream plan` finds the best split"
    return Line(shown, "open", note=why, decides="placement.split")


SIDES = {
    "verl": ("rollout.n_gpus_per_node", "trainer.n_gpus_per_node", ("rollout.nnodes", "trainer.nnodes")),
    "slime": ("rollout_num_gpus", "actor_num_gpus_per_node", ("actor_num_nodes",)),
    "prime-rl": ("deployment.num_infer_gpus", "deployment.num_train_gpus", ()),
}
"""Names of the GPUs of either side, and of what has to be 1."""


def _prompt_room(shown: str, value: Any, foreign: Foreign) -> Line:
    """Of prompt and answer together."""
    answer = foreign.value("sampling.max_completion_tokens", "sampling.max_tokens")
    if not isinstance(answer, int) or not isinstance(value, int) or value <= answer:
        why = f"prompt and answer have {value} together there; the answer alone has a bound here"
        return Line(shown, "open", note=why, decides="rollout.max_new_tokens")
    return Line(shown, "key", {"data.max_prompt_tokens": value - answer}, "what the longest answer leaves")


def _sides_of_areal(shown: str, value: Any, foreign: Foreign) -> Line:
    """`sglang:d4p1t2` and `fsdp:d4p1t1`."""
    sides = [BACKEND.fullmatch(str(foreign.value(f"{side}.backend", default=""))) for side in ("rollout", "actor")]
    if not all(sides) or any(side is not None and side["pipeline"] not in (None, "1") for side in sides):
        return Line(shown, "open", note="give the GPUs of both sides", decides="placement.split")
    tensor = [int(side["tensor"] or 1) for side in sides if side]
    rollout, actor = (int(side["data"]) * each for side, each in zip(filter(None, sides), tensor, strict=True))
    return Line(shown, "key", {"placement.split": f"{rollout}:{actor}", "placement.tensor_parallel": tensor[0]})


BACKEND = re.compile(r"\w+:d(?P<data>\d+)(?:p(?P<pipeline>\d+))?(?:t(?P<tensor>\d+))?")


BETAS = ("adam_beta", "trainer.optim.betas", "actor.optimizer.beta")
RUN_NAMES = ("trainer.experiment_name", "wandb_group", "wandb.name", "experiment_name", "run_name")

CONVERTERS: Mapping[str, Convert] = {
    **JUDGES,
    "data.train_files": _prompts("data.train"),
    "data.val_files": _prompts("data.eval"),
    "eval_prompt_data": _prompts("data.eval"),
    "optim.betas": _betas,
    **{f"{start}{number}": _betas for start in BETAS for number in (1, 2)},
    **dict.fromkeys(
        ("actor.clip_ratio", "actor.eps_clip"),
        _as(lambda value: {f"algorithm.loss.ppo_clip.clip_{side}": value for side in ("low", "high")}),
    ),
    "actor.kl_ctl": _kl_of_areal,
    "ref.path": _reference_of_areal,
    "generation_batch_size": _answers("num_generations", default=8),  # over all processes
    # batches of one generation, several of which can make an update
    "steps_per_generation": _divided(
        "learner.minibatches", ("gradient_accumulation_steps",), 1, "{size} batches an update do not divide {value}"
    ),
    "max_steps": _steps("learner.total_steps"),
    "save_steps": _steps("checkpoint.every_steps"),
    "eval_steps": _steps("evaluation.every_steps"),
    "warmup_steps": _steps("learner.warmup_steps"),
    "ref_model_sync_steps": _steps("algorithm.reference_refresh_steps"),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _size_of_trl),
    **dict.fromkeys(
        (f"vllm_importance_sampling_{end}" for end in ("correction", "mode", "clip_max", "clip_min", "cap")),
        _correction_of_trl,
    ),
    "norm_adv_by_std_in_grpo": _undivided,
    "disable_grpo_std_normalization": _undivided,
    "adv_estimator": _advantage,
    "advantage_estimator": _advantage,
    "beta": _as(lambda value: {"algorithm.kl": "k3", "algorithm.kl_in": "loss", "algorithm.kl_coef": value}),
    "max_off_policy_steps": _lag_of_prime,
    "trainer.loss.type": _loss_of_prime,
    "groups of zero advantage": _flat_of_prime,
    "main_ppo": _lag_of_verl,
    "GRPOTrainer": _as(lambda _: {"replay.async_lag": 0}, "1 lets both sides work at once"),
    "rollout_is_threshold": _threshold,
    # tokens whose weight is above take no part
    "rejection_sampling.upper": _as(lambda high: {"algorithm.correction": {"icepop": {"low": 0.0, "high": high}}}),
    "trainer.logger": _trackers,
    "use_wandb": _trackers,
    "report_to": _trackers,
    **dict.fromkeys(RUN_NAMES, _as(lambda value: {"run.name": NO_NAME.sub("-", str(value)).strip("-._") or "run"})),
    "wandb.project": _as(lambda value: {"tracking.project": value, "tracking.trackers": ["wandb"]}),
    "ppo_mini_batch_size": _updates,
    "critic.ppo_epochs": _updates_of_critic,
    "global_batch_size": _updates,
    "trigger_parameter_sync_step": _synced,
    "staleness_threshold": _as(lambda value: {"replay.async_lag": math.ceil(value)}),
    "orchestrator.batch_size": _answers("orchestrator.group_size", "rollouts_per_example", default=1),
    "seq_len": _prompt_room,
    "trainer.model.seq_len": _as(
        lambda value: {"learner.max_tokens_per_microbatch": value}, "answers are packed into it"
    ),
    **dict.fromkeys((name for sides in SIDES.values() for name in sides[:2]), _split),
    "trainer.n_gpus_per_node": _split,
    "rollout.backend": _sides_of_areal,
}
"""By end of the name."""
