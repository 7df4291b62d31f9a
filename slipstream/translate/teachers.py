"""Settings of other frameworks about distillation: which teachers there are, and what is learned from them."""

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.translate.names import plain
from slipstream.translate.settings import Foreign, Line, Setting

WAY, ONLY = "algorithm.distillation", "teacher"
"""The key of what is learned; our name of a teacher that has none there."""
IN_WAY = f"a part of {WAY}"
LOSS = "distillation.distillation_loss"
ESTIMATORS = {"k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""verl's, of a loss from one logprob a token."""
TOPS = ("forward_kl_topk", "forward_kl_topk_tail")
CLAMPS = ("loss_max_clamp", "log_prob_min_clamp")
TRAINERS = {"DistillationTrainer": "full", "AsyncDistillationTrainer": "top_k"}
"""TRL's, and what they learn from; the latter asks servers."""


def line_of(setting: Setting, foreign: Foreign) -> Line | None:
    """What a setting about teachers means; None: it is about something else, or nothing is distilled there."""
    reader = READERS.get(foreign.framework)
    return None if reader is None else reader(setting, foreign)


def _key(setting: Setting, key: str, value: Any = None, note: str = "") -> Line:
    """The value of one setting; the user decides where the file does not say it."""
    if setting.open:
        return Line(setting.shown, "open", note=setting.open, decides=key)
    return Line(setting.shown, "key", {key: setting.value if value is None else value}, note)


def _not_needed(setting: Setting, note: str = IN_WAY) -> Line:
    return Line(setting.shown, "not needed", note=note)


def _of_verl(setting: Setting, foreign: Foreign) -> Line | None:
    start, *parts = plain(setting.name).split(".")
    if start != "distillation" or not foreign.is_on("distillation.enabled"):
        return None
    names = _teachers_of_verl(foreign)
    match parts:
        case ["enabled"]:
            return _way_of_verl(setting, foreign)
        case ["teacher_model" | "teacher_models", *_] if setting.value is None and not setting.open:
            return _not_needed(setting, "unset there")
        case ["teacher_models", "teacher_model", *_] if len(names) > 1:
            return _not_needed(setting, "left out there, too, where other teachers have names")
        case ["teacher_models", name, "model_path"]:
            return _key(setting, f"teachers.{name}.path")
        case ["teacher_model", "model_path"]:
            return _key(setting, "teachers.teacher_model.path")
        case ["teacher_models", name, "key"] if len(names) > 1:
            column = foreign.value("distillation.teacher_key", default="data_source")
            return _key(setting, f"teachers.{name}.rows", {column: setting.value})
        case ["teacher_models", name, "num_replicas"] if setting.value:
            return _devices(setting, name)
        case ["n_gpus_per_node"] if len(names) < 2:
            return _devices(setting, names[0] if names else "teacher_model")
        case ["distillation_loss", clamp] if clamp in CLAMPS and setting.value is not None:
            return Line(setting.shown, "no counterpart", note="log ratios are held within ±20, and nothing else is cut")
        case ["distillation_loss", *_]:
            return _not_needed(setting)
    return _not_needed(setting, "a teacher's process spans the devices of its part, with engine settings of its own")


def _teachers_of_verl(foreign: Foreign) -> list[str]:
    parts = [plain(setting.name).split(".") for setting in foreign.settings]
    return list(dict.fromkeys(one[2] for one in parts if one[:2] == ["distillation", "teacher_models"] and one[3:]))


def _devices(setting: Setting, name: str) -> Line:
    why = "GPUs there are counted; here a part of devices, such as node0:7, is one process over them"
    return Line(setting.shown, "open", note=why, decides=f"teachers.{name}.devices")


def _way_of_verl(setting: Setting, foreign: Foreign) -> Line:
    def value(name: str, default: Any) -> Any:
        return foreign.value(f"{LOSS}.{name}", default=default)

    mode, by_gradient = value("loss_mode", "k3"), value("use_policy_gradient", False)
    has_task = foreign.value(f"{LOSS}.use_task_rewards", f"{LOSS}.use_policy_loss", default=True)
    options = {"coef": value("distillation_loss_coef", 1.0)} if has_task else {"task": 0.0}
    if by_gradient and mode in ("k1", "kl"):
        return _key(setting, WAY, {"sampled_advantage": options})
    if not by_gradient and mode in TOPS:
        note = "with the tail as one token more" if mode == TOPS[0] else ""
        return _key(setting, WAY, {"top_k": {"k": value("topk", 32), "direction": "forward", **options}}, note)
    if not by_gradient and mode in ESTIMATORS:
        return _key(setting, WAY, {"sampled": {"estimator": ESTIMATORS[mode], **options}})
    why = f"loss_mode {mode} with use_policy_gradient {by_gradient} is not here; choose what is learned"
    return Line(setting.shown, "open", note=why, decides=WAY)


def _of_slime(setting: Setting, foreign: Foreign) -> Line | None:
    if not foreign.is_on("use_opd"):
        return None
    kind = foreign.value("opd_type")
    match plain(setting.name):
        case "use_opd" if kind == "self":
            why = (
                "a divergence between the two KL divergences there; choose what is learned, and a teacher with context"
            )
            return Line(setting.shown, "open", note=why, decides=WAY)
        case "use_opd":
            options = {"coef": foreign.value("opd_kl_coef", default=1.0)}
            # its reward function of this mode gives every answer 0
            is_alone = "on_policy_distillation" in str(foreign.value("custom_reward_post_process_path"))
            return _key(setting, WAY, {"sampled_advantage": options | ({"task": 0.0} if is_alone else {})})
        case "opd_type" if kind == "sglang":
            why = "name of the model behind teachers.teacher.url"
            return Line(setting.shown, "open", note=why, decides=f"teachers.{ONLY}.model")
        case "rm_url" if kind == "sglang":
            return _key(setting, f"teachers.{ONLY}.url", str(setting.value).removesuffix("/generate") + "/v1")
        case "opd_teacher_load":
            why = "a checkpoint of Megatron there; give its Hugging Face folder"
            return Line(setting.shown, "open", note=why, decides=f"teachers.{ONLY}.path")
        case "custom_rm_path" | "custom_reward_post_process_path" if "on_policy_distillation" in str(setting.value):
            return _not_needed(setting, "rollout servers ask teachers by themselves")
        case name if name.startswith(("opd_", "opsd_")):
            return _not_needed(setting)
    return None


def _of_trl(setting: Setting, foreign: Foreign) -> Line | None:
    trainer = foreign.value("recipe")
    if trainer not in TRAINERS:
        return None
    match plain(setting.name).rpartition(".")[2]:
        case "recipe":
            return _way_of_trl(setting, foreign, TRAINERS[trainer])
        case "teacher_model" | "teacher_model_name_or_path":
            return _key(setting, f"teachers.{ONLY}.path")
        case "teacher_server_urls" if setting.open or isinstance(setting.value, str):
            return _key(setting, f"teachers.{ONLY}.url", f"{str(setting.value).rstrip('/')}/v1")
        case "teacher_server_urls" if isinstance(setting.value, dict):
            urls = {f"teachers.{name}.url": f"{url.rstrip('/')}/v1" for name, url in setting.value.items()}
            rows = {f"teachers.{name}.rows": {"teacher_id": name} for name in setting.value} if len(urls) > 1 else {}
            return Line(setting.shown, "key", {**urls, **rows}, "each needs the name of its model, teachers.NAME.model")
        case "num_generations":
            return Line(setting.shown, "key", {"rollout.group_size": 1}, "one answer a prompt there")
        case "teacher_temperature" if setting.value != foreign.value("temperature", default=1.0):
            return Line(setting.shown, "no counterpart", note="teachers score at rollout.temperature")
        case "add_tail_bucket" if setting.value is False:
            return Line(setting.shown, "no counterpart", note="without it the k probabilities are no distribution")
        case "beta" | "teacher_top_k" | "teacher_temperature" | "add_tail_bucket":
            return _not_needed(setting)
    return None


def _way_of_trl(setting: Setting, foreign: Foreign, way: str) -> Line:
    """`beta` 0 is KL(teacher || policy) there, 1 the other one, and between them is a mixture."""
    beta = foreign.value("beta", default=1.0 if way == "full" else 0.0)
    if beta not in (0, 1) or (way == "top_k" and beta):
        why = f"beta {beta:g} mixes both KL divergences there, or compares two tokens; choose what is learned"
        return Line(setting.shown, "open", note=why, decides=WAY)
    options = {"direction": "reverse" if beta else "forward", "task": 0.0}
    if way == "full":
        return Line(setting.shown, "key", {WAY: {way: options}, f"teachers.{ONLY}.where": "learner"})
    return _key(setting, WAY, {way: {"k": foreign.value("teacher_top_k", default=8), **options}})


READERS: Mapping[str, Callable[[Setting, Foreign], Line | None]] = {
    "verl": _of_verl,
    "slime": _of_slime,
    "TRL": _of_trl,
}
