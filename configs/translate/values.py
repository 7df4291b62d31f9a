"""What a value of another framework is here, once tables.py has said which key it belongs to."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from configs.learner import PROJECTIONS
from configs.translate.settings import Foreign

Pairs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Here:
    """Keys and values here; without any, `note` is the reason.

    Example: Here({"algorithm.kl": "k3", "algorithm.kl_in": "loss"}, note="...")
    """

    pairs: Pairs = field(default_factory=dict)
    note: str = ""
    is_needed: bool = True
    """Of one without keys: whether something of the file is lost."""


def nothing(why: str) -> Here:
    """There is nothing to set."""
    return Here({}, why, is_needed=False)


NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""What the name of a run or of a dataset cannot have."""
HUB = re.compile(r"(?!(?:models?|checkpoints?|ckpts?|data|runs|outputs?|\.+)/)[\w.-]+/[\w.-]+")
"""Organisation and model; a folder of one's own is mostly called otherwise."""
LOSSES: Mapping[str, Mapping[str, Pairs]] = {
    "verl": {
        "vanilla": {"algorithm.loss": "ppo_clip"},
        "gspo": {"algorithm.loss": "gspo"},
        "cispo": {"algorithm.loss": "cispo"},
        "sapo": {"algorithm.loss": "sapo"},
        "dppo_tv": {"algorithm.loss": "dppo_tv"},
    },
    "prime-rl": {"default": {"algorithm.loss": "dppo_tv"}},
    "TRL": {
        "grpo": {"algorithm.loss": "ppo_clip", "algorithm.aggregation": "sequence"},
        "dapo": {"algorithm.loss": "ppo_clip", "algorithm.aggregation": "token"},
        "bnpo": {"algorithm.loss": "ppo_clip", "algorithm.aggregation": "token"},
        "dr_grpo": {"algorithm.loss": "ppo_clip", "algorithm.aggregation": "constant"},
        "cispo": {"algorithm.loss": "cispo", "algorithm.aggregation": "token"},
        "sapo": {"algorithm.loss": "sapo", "algorithm.aggregation": "sequence"},
    },
}
CHOICES: Mapping[str, Mapping[Any, Any]] = {
    "algorithm.aggregation": {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum-norm": "constant",
        True: "token",
        False: "sequence",
    },
    "algorithm.advantage": {
        "grpo": "grpo",
        "rloo": "rloo",
        "gae": "gae",
        "ppo": "gae",
        "reinforce_plus_plus": "reinforce++",
        "reinforce_plus_plus_baseline": "reinforce++_baseline",
    },
    "algorithm.kl": {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"},
    "learner.schedule": {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "cosine": "cosine",
        "linear": "linear",
    },
    "weight_bus.transport": {"nccl": "collective", "filesystem": "disk", "disk": "disk"},
}
"""By key: names there, and the name here."""
OFF_IS_ZERO = ("checkpoint.every_steps", "evaluation.every_steps")
K1_IN_LOSS = (
    "k1 in a loss has a gradient of 0 in expectation and regularises nothing; for a KL term that does, give --set"
    " algorithm.kl=k3 --set algorithm.kl_coef=..., or k1 with --set algorithm.kl_in=reward"
)
AS_ITS_TYPE = "k1 in a loss regularises nothing, as the line of the estimator says"
NOT_HERE_ENGINE = "{value!r} is no engine here: SGLang on GPUs, the embedded torch engine on a CPU"
SCHEDULE = "linear and cosine end at 10 % of the peak here"


def on_our_side(framework: str, name: str, key: str, value: Any, foreign: Foreign) -> Here:
    """What a setting with a counterpart is here."""
    if key in CONVERTERS:
        return CONVERTERS[key](framework, name, value, foreign)
    if key == "evaluation.num_prompts" and value is not None and value < 0:
        return Here({}, "all of them there; here the first 512: --set evaluation.num_prompts=N")
    if key == "evaluation.temperature" and value == 0:
        return Here({"evaluation.sampled": False}, "greedy answers alone")
    if key == "learner.total_steps" and value is not None and value < 0:
        return nothing(f"{value}: as many as the epochs have")
    if key == "checkpoint.keep" and (value is None or value <= 0):
        return Here({}, "all are kept there; here the newest two: --set checkpoint.keep=N")
    if key in CHOICES:
        return _choice(key, value)
    if key in OFF_IS_ZERO and (value is None or value < 0):
        return Here({key: 0})
    if value is None:
        return nothing("unset there; what is said below counts, or the default here")
    return Here({key: value})


def _choice(key: str, value: Any) -> Here:
    known = CHOICES[key]
    if value not in known:
        names = ", ".join(sorted({str(one) for one in known.values()}))
        return Here({}, f"{key} has no {value!r}; it takes {names}")
    note = SCHEDULE if key == "learner.schedule" and value in ("linear", "cosine") else ""
    return Here({key: known[value]}, note)


def _model(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if not HUB.fullmatch(str(value)):
        return Here({"model.path": str(value)})
    folder = f"models/{str(value).split('/')[1]}"
    return Here({"model.path": folder}, f"a folder: hf download {value} --local-dir {folder}")


def _prompts(key: str) -> Callable[..., Here]:
    def convert(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
        if framework == "slime" and isinstance(value, list):  # --eval-prompt-data name path [name path]
            return Here(
                {key: dict(zip(value[::2], value[1::2], strict=False))} if len(value) % 2 == 0 else {key: value[0]}
            )
        if isinstance(value, list):
            paths = [str(path) for path in value]
            return Here({key: paths[0] if len(paths) == 1 else _named(paths)})
        return Here({key: str(value)})

    return convert


def _named(paths: list[str]) -> dict[str, str]:
    """Files by the names of their folders, where each has one of its own, else by their own, else by whole paths."""
    folders = [PurePosixPath(path).parent.name or path for path in paths]
    whole = [NO_NAME.sub("-", path.rpartition(".")[0] or path).strip("-._") for path in paths]
    for names in (folders, [PurePosixPath(path).stem for path in paths], whole):
        if len(set(names)) == len(set(paths)):
            return dict(zip(names, paths, strict=True))
    return dict(zip(paths, paths, strict=True))


def _loss(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    found = LOSSES.get(framework, {}).get(value)
    return (
        Here(dict(found)) if found else Here({}, f"no loss {value!r} here; algorithm.loss takes a file of yours, too")
    )


def _advantage(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    undivided = foreign.value("norm_adv_by_std_in_grpo", default=True) is False or foreign.value(
        "disable_grpo_std_normalization", default=False
    )
    if framework == "slime" and value in ("gspo", "cispo"):
        return Here({"algorithm.advantage": "dr_grpo" if undivided else "grpo", "algorithm.loss": value})
    if framework == "prime-rl":
        is_grpo = value in ("grpo", ["grpo"])
        why = "the group's mean is subtracted there, and its deviation does not divide"
        return Here({"algorithm.advantage": "dr_grpo"}, why) if is_grpo else Here({}, f"no counterpart of {value!r}")
    if value == "grpo" and undivided:
        return Here({"algorithm.advantage": "dr_grpo"}, "without the deviation")
    return _choice("algorithm.advantage", value)


def _betas(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if isinstance(value, list):
        return Here({"learner.betas": [float(one) for one in value]})
    first = foreign.value("adam_beta1", "betas1", default=0.9)
    second = foreign.value("adam_beta2", "betas2", default=0.999)
    return Here({"learner.betas": [float(first), float(second)]})


def _recompute(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if value in (True, "full", "selective"):
        return Here({"learner.recompute": "auto"}, "recomputes what does not fit, and no more")
    return Here({"learner.recompute": "none"})


KL_TYPES = {"verl": "low_var_kl", "slime": "k1", "TRL": "k3"}
"""Estimators of a KL term in the loss, where the file says nothing."""


def kl_estimator(foreign: Foreign, place: str) -> str | None:
    """The estimator here of a KL term in `loss` or `reward`; None: there is none like it."""
    name = "kl_loss_type" if place == "loss" else "kl_penalty"
    default = KL_TYPES.get(foreign.framework, "k3") if place == "loss" else "kl"
    estimator: str | None = CHOICES["algorithm.kl"].get(foreign.value(name, default=default))
    return estimator


KL_TERMS = {"loss": ("use_kl_loss", "kl_loss_coef"), "reward": ("use_kl_in_reward", "kl_ctrl.kl_coef")}
"""Switch and factor of verl and slime, by where the term stands."""


def kl_coefficient(foreign: Foreign, place: str) -> float:
    """The factor of a KL term in `loss` or `reward`; 0: there is no such term."""
    if foreign.framework == "TRL":
        return (foreign.value("beta") or 0.0) if place == "loss" else 0.0
    switch, factor = KL_TERMS[place]
    default = 0.001 if foreign.framework == "verl" else 0.0
    return (foreign.value(factor, default=default) or 0.0) if foreign.value(switch) else 0.0


def _kl_coef(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    place = "reward" if framework == "verl" and name.endswith("kl_ctrl.kl_coef") else "loss"
    is_on = bool(value) if framework == "TRL" else foreign.value(KL_TERMS[place][0], default=False) is True
    if not is_on:
        return nothing("the KL term is off there")
    if not value:
        return nothing("a factor of 0 has no gradient, and a reference model would be computed for a metric")
    if place == "loss" and has_k1_in_loss(foreign):
        return nothing(AS_ITS_TYPE)
    if framework == "TRL":
        return Here({"algorithm.kl": "k3", "algorithm.kl_in": place, "algorithm.kl_coef": float(value)})
    return Here({"algorithm.kl_coef": float(value)})


def _kl_type(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if not kl_coefficient(foreign, "loss"):
        return nothing("the KL term is off there")
    return Here({}, K1_IN_LOSS) if has_k1_in_loss(foreign) else _choice("algorithm.kl", value)


def has_k1_in_loss(foreign: Foreign) -> bool:
    """Whether the estimator of a KL term in the loss is k1 there, which does nothing and is refused here."""
    return kl_estimator(foreign, "loss") == "k1"


def _memory(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if shares_gpus(foreign):
        return nothing("that was the engine's part of a GPU that it shared; engines have GPUs of their own here")
    return Here({"rollout.sglang.mem_fraction_static": float(value)}, "SGLang counts weights and KV cache")


def shares_gpus(foreign: Foreign) -> bool:
    """Whether engines and learner take turns on the same GPUs there."""
    if foreign.framework == "slime":
        return bool(foreign.value("colocate", default=False))
    if foreign.framework == "verl":
        return not foreign.is_asynchronous
    return foreign.framework == "TRL" and foreign.value("vllm_mode", default="colocate") == "colocate"


def _correction(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if value in (False, None) or (framework == "TRL" and not foreign.value("use_vllm")):
        return nothing("ppo_clip's ratio is against the policy that sampled, which corrects by itself")
    kind = "sequence_mis" if framework == "TRL" else "token_tis"
    return Here(
        {"algorithm.proximal": "current", "algorithm.correction": kind},
        "ratios against the policy at the start of a step; leave both out for one forward less (docs/algorithms.md)",
    )


def _trackers(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if framework == "slime":
        return Here({"tracking.trackers": ["wandb"]} if value else {})
    names = [str(one) for one in (value if isinstance(value, list) else [value])]
    kept = [one for one in names if one not in ("console", "none", "None")]
    note = "the terminal shows every step" if "console" in names else ""
    return Here({"tracking.trackers": kept}, note) if kept else nothing(note or "no tracker there")


def _name(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    return Here({"run.name": NO_NAME.sub("-", str(value)).strip("-._") or "run"})


def _engine(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if value in ("sglang", "torch"):
        return nothing("rollout.engine is `auto`: SGLang on GPUs")
    return Here({}, NOT_HERE_ENGINE.format(value=value))


def _reference(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if framework == "slime":
        return nothing("Megatron's format; algorithm.reference_path is a Hugging Face folder, unset the model itself")
    if value is None or not any(kl_coefficient(foreign, place) for place in ("loss", "reward")):
        return nothing("no other reference model there")
    return Here({"algorithm.reference_path": value})


def _lora(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if not value:
        return nothing("no adapters there")
    return Here({"learner.lora.rank": int(value)})


def _lora_only(key: str) -> Callable[..., Here]:
    def convert(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
        if not foreign.is_on("lora_rank", "lora_r", "peft_config.r", "lora.rank"):
            return nothing("no adapters there")
        if key == "learner.lora.targets" and isinstance(value, list):
            kept = [one for one in value if one in PROJECTIONS]
            return Here({key: kept}, "" if kept == value else "others are in no model here")
        return Here({key: value})

    return convert


def _lag(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    bounded = min(8, int(value))
    return Here({"replay.async_lag": bounded}, "" if bounded == value else "8 is the most")


def _clip_high(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if value is None:
        return nothing("unset there: both sides are alike, as below")
    return Here({"algorithm.clip_high": float(value)})


def _filters(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    if value == []:
        return Here({"algorithm.drop_zero_advantage": False}, "no filter leaves answers out there")
    return nothing("answers of zero advantage are left out by default (algorithm.drop_zero_advantage)")


def _dynamic(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    return Here({"algorithm.dynamic_sampling": bool(value)})  # a path, a list of filters, or a switch


def _rollouts(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    every = foreign.value("logging_steps", default=500)
    return Here({"tracking.save_rollouts_every": max(1, int(every))}) if value else nothing("off there and here")


def _template_options(framework: str, name: str, value: Any, foreign: Foreign) -> Here:
    return Here({"model.chat_template_options": value}) if isinstance(value, dict) else nothing("none there")


CONVERTERS: Mapping[str, Callable[..., Here]] = {
    "model.path": _model,
    "model.chat_template_options": _template_options,
    "data.train": _prompts("data.train"),
    "data.eval": _prompts("data.eval"),
    "algorithm.loss": _loss,
    "algorithm.advantage": _advantage,
    "algorithm.clip_high": _clip_high,
    "algorithm.kl": _kl_type,
    "algorithm.kl_coef": _kl_coef,
    "algorithm.correction": _correction,
    "algorithm.reference_path": _reference,
    "algorithm.drop_zero_advantage": _filters,
    "algorithm.dynamic_sampling": _dynamic,
    "learner.betas": _betas,
    "learner.recompute": _recompute,
    "learner.lora.rank": _lora,
    "learner.lora.alpha": _lora_only("learner.lora.alpha"),
    "learner.lora.targets": _lora_only("learner.lora.targets"),
    "replay.async_lag": _lag,
    "rollout.engine": _engine,
    "rollout.sglang.mem_fraction_static": _memory,
    "run.name": _name,
    "tracking.save_rollouts_every": _rollouts,
    "tracking.trackers": _trackers,
}
