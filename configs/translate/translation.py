"""Every setting of a file as a line, what its framework has for the rest, and the configuration of all of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.algorithm import LEAST_ANSWER_CLIP, WIDE_ANSWER_CLIP
from configs.aliases import BY_FRAMEWORK, ends, plain
from configs.loading import apply_override, inline, leaf_keys
from configs.translate.batches import Given, groups_per_step
from configs.translate.settings import Foreign, Setting, can_mean, section_of
from configs.translate.tables import NOT_HERE, NOT_NEEDED
from configs.translate.together import TOGETHER, divided
from configs.translate.values import Here, nothing, on_our_side

Kind = Literal["key", "not needed", "no counterpart", "open", "unknown"]
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "verl": {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
        "algorithm.adv_estimator": "gae",
        "trainer.total_epochs": 30,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    },
    "slime": {
        "--n-samples-per-prompt": 1,
        "--rollout-max-response-len": 8192,
        "--eps-clip": 0.2,
        "--eps-clip-high": 0.2,
        "--calculate-per-token-loss": False,
        "--rollout-shuffle": False,
        "--lr-warmup-iters": 0,
        "--weight-decay": 0.01,
        "--adam-beta2": 0.999,
    },
    "prime-rl": {
        "orchestrator.group_size": 1,
        "orchestrator.algorithms": "grpo",
        "trainer.loss.type": "default",
        "trainer.optim.lr": 1e-6,
        "trainer.optim.weight_decay": 0.01,
        "trainer.optim.betas2": 0.999,
        "trainer.scheduler.warmup_steps": 0,
        "orchestrator.seq_len": 2048,
    },
    "TRL": {
        "num_generations": 8,
        "max_completion_length": 512,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "adam_beta2": 0.999,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "num_train_epochs": 3,
        "save_steps": 500,
    },
}
"""What counts there where the file says nothing, as far as it differs from what counts here."""
BOUNDS = ("algorithm.clip_low", "algorithm.clip_high", "algorithm.clip_dual")
READS = {"ppo_clip": BOUNDS, "gspo": BOUNDS[:2], "cispo": BOUNDS[1:2]}
"""Of BOUNDS, what a loss reads: another one would be refused, as it would look as if it had counted."""
SECRET = re.compile(r"(wandb|api|access|auth|hub|hf|swanlab|comet)_?(key|token)\b|password|secret", re.IGNORECASE)
FOLLOWS = {"--eps-clip-high": ("--eps-clip",), "epsilon_high": ("epsilon",)}
"""Names that are, unset, what another name has."""
LENGTHS = {
    "learner.max_tokens_per_microbatch": None,
    "data.max_prompt_tokens": 1024,
    "rollout.max_new_tokens": 1024,
}
"""Of a microbatch, and of a trajectory, where nothing is said."""
LAG = {
    True: "sampling runs ahead of training there, too; 0 to 8 are possible",
    False: "there sampling and training take turns, which is 0; 1 overlaps them",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One setting and what became of it."""

    shown: str
    kind: Kind
    pairs: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """A file as lines and as a configuration."""

    foreign: Foreign
    lines: tuple[Line, ...]
    defaults: tuple[Line, ...]
    """Of what the file does not set, where the framework's default is not ours."""
    decided: tuple[Line, ...]
    """What neither the file nor its framework says."""
    tree: dict[str, Any]
    sources: Mapping[str, str]
    """Key to the setting that it comes from."""


def translate(foreign: Foreign, given: Given, overrides: Sequence[str] = ()) -> Translation:
    """Translate settings, then defaults, then what has to be decided; overrides count most. Raises ConfigError."""
    pairs: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def note(line: Line) -> Line:
        for key, value in line.pairs.items():
            pairs[key] = value
            sources[key] = line.shown
        return line

    chosen = {override.partition("=")[0].strip() for override in overrides}
    of_file = [_line(setting, foreign, given) for setting in foreign.settings]
    loss = next((line.pairs["algorithm.loss"] for line in reversed(of_file) if "algorithm.loss" in line.pairs), "")
    loss = loss or ("dppo_tv" if foreign.framework == "prime-rl" else "ppo_clip")
    lines = tuple(note(_read_by(loss, line)) for line in of_file)
    defaults = tuple(
        note(line)
        for line in (_read_by(loss, one) for one in _defaults(foreign, given, pairs, chosen))
        if line.kind != "not needed"
    )
    decided = tuple(note(line) for line in _decided(foreign, given, pairs, chosen))
    tree: dict[str, Any] = {}
    for key, value in pairs.items():
        _put(tree, key, value)
    for override in overrides:
        apply_override(tree, override)
        sources[override.partition("=")[0].strip()] = "--set"
    return Translation(foreign, lines, defaults, decided, tree, sources)


def _read_by(loss: str, line: Line) -> Line:
    """The line without bounds that the loss does not have."""
    pairs = {key: value for key, value in line.pairs.items() if key not in BOUNDS or key in READS.get(loss, ())}
    narrow = [key for key in pairs if key in BOUNDS and loss == "gspo" and pairs[key] < LEAST_ANSWER_CLIP]
    if narrow:
        why = "widened: here the ratio is against the engine, whose rounding alone passes bounds of recomputed logprobs"
        return Line(line.shown, "key", {**pairs, **dict.fromkeys(narrow, WIDE_ANSWER_CLIP)}, why)
    if pairs == line.pairs:
        return line
    return Line(
        line.shown, "key" if pairs else "not needed", pairs, line.note if pairs else f"{loss} has no such bound"
    )


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def _line(setting: Setting, foreign: Foreign, given: Given) -> Line:
    if SECRET.search(plain(setting.name)):
        return Line(f"{setting.name} ...", "not needed", note="a secret is not copied")
    # both become comments of one line
    setting = replace(setting, shown=" ".join(setting.shown.split()), open=" ".join(setting.open.split()))
    if setting.open:
        keys = BY_FRAMEWORK[foreign.framework]
        key = next((keys[end] for end in _ends(setting.name, foreign) if end in keys), "")
        if not key and (other := _of_another_model(setting.name, foreign)) is not None:
            return Line(setting.shown, "no counterpart" if other.is_needed else "not needed", note=other.note)
        return Line(setting.shown, "open", note=f"{setting.open}" + (f"; give --set {key}=..." if key else ""))
    try:
        here = _here(setting.name, setting.value, foreign, given)
    except (TypeError, ValueError, ArithmeticError) as error:
        return Line(setting.shown, "open", note=f"its value is of no use: {error}")
    if here is None:
        return Line(setting.shown, "unknown")
    if here.pairs:
        return Line(setting.shown, "key", here.pairs, here.note)
    return Line(setting.shown, "no counterpart" if here.is_needed else "not needed", note=here.note)


def _here(name: str, value: Any, foreign: Foreign, given: Given) -> Here | None:
    """By what depends on other settings, then by the tables; None: the name is in none of them."""
    together, keys = TOGETHER[foreign.framework], BY_FRAMEWORK[foreign.framework]
    for end in _ends(name, foreign):
        if end in together and (found := together[end](foreign, given, value)) is not None:
            return found
        if end in keys:
            key = keys[end]
            if key == "critic.gamma" and value != 1 and _estimator(foreign) == "reinforce_plus_plus":
                return Here({}, "returns are not discounted here without a critic")
            if key.startswith("critic.") and not _has_critic(foreign):
                return nothing("grpo has no critic")
            return on_our_side(foreign.framework, plain(name), key, value, foreign)
        if end in NOT_HERE:
            return Here({}, NOT_HERE[end])
        if end in NOT_NEEDED:
            return nothing(NOT_NEEDED[end])
    if (other := _of_another_model(name, foreign)) is not None:
        return other
    return Here({name: value}) if name in leaf_keys() else None


def _ends(name: str, foreign: Foreign) -> Iterator[str]:
    """The ends of a name that the tables may be asked for."""
    return (end for end in ends(name) if can_mean(foreign.framework, plain(name), end))


def _of_another_model(name: str, foreign: Foreign) -> Here | None:
    """What a setting of another model's section is that has no key; None: the policy's, or one that has to be named."""
    section = section_of(foreign.framework, plain(name))
    if section is None or section.model == "evaluation":
        return None
    if section.switch or section.model == "teacher":
        is_missed = not section.switch or foreign.is_on(section.switch)
        return Here({}, f"the {section.model}'s, which there is none of here", is_missed)
    parts = plain(name).split(".")
    if section.model == "critic" and _has_critic(foreign) and ("optim" in parts or "grad_clip" in parts):
        return Here({}, "the critic's; here it has the settings of the learner, but for critic.lr")
    is_about_rewards = any(word != "reward_model" and word in section.words for word in parts[1:])
    if section.model == "reward model" and is_about_rewards:
        return None
    return nothing(f"the {section.model}'s, and not needed here")


def _estimator(foreign: Foreign) -> Any:
    default = DEFAULTS[foreign.framework].get("algorithm.adv_estimator", "grpo")
    return foreign.value("adv_estimator", "advantage_estimator", default=default)


def _has_critic(foreign: Foreign) -> bool:
    return _estimator(foreign) in ("gae", "ppo")


def _defaults(foreign: Foreign, given: Given, pairs: Mapping[str, Any], chosen: set[str]) -> Iterator[Line]:
    """Lines for names that the file does not have, unless their keys are decided already."""
    named = {end for setting in foreign.settings for end in ends(setting.name)}
    for name, value in DEFAULTS[foreign.framework].items():
        end = plain(name)
        if end in named or (end.rpartition(".")[2] in named and "." not in end):
            continue
        for other in FOLLOWS.get(name, ()):
            value = foreign.value(plain(other), default=value)
        line = _line(Setting(name, value, f"{name}: {inline(value)}"), foreign, given)
        missing = {key: one for key, one in line.pairs.items() if key not in pairs and key not in chosen}
        if missing:
            yield Line(line.shown, "key", missing, line.note)
        elif line.kind == "no counterpart":
            yield line


def _decided(foreign: Foreign, given: Given, pairs: Mapping[str, Any], chosen: set[str]) -> Iterator[Line]:
    have = set(pairs) | chosen
    if "run.name" not in have:
        yield Line("the run's name", "key", {"run.name": f"from-{foreign.framework.lower()}"})
    if "replay.async_lag" not in have:
        yield Line("lag", "key", {"replay.async_lag": 1}, LAG[foreign.is_asynchronous])
    if "placement.split" not in have:
        found = divided(given.gpus, 1) if given.gpus else Here({"placement.split": "1:1"}, "give --gpus N for N GPUs")
        yield Line("GPUs", "key", found.pairs, found.note)
    if "rollout.groups_per_step" not in have and (groups := groups_per_step(foreign, given)) is not None:
        yield Line("batch", "key", {"rollout.groups_per_step": groups})
    if "reward.function" not in have:
        yield _reward(foreign)
    own, *parts = (pairs.get(key, default) for key, default in LENGTHS.items())
    # what is no number is refused by its own name when the configuration is checked
    if all(isinstance(one, (int, float)) for one in (own, *parts)) and own < sum(parts):
        longest = {"learner.max_tokens_per_microbatch": int(sum(parts))}
        yield Line("microbatch", "key", longest, "one trajectory has to fit")


def _reward(foreign: Foreign) -> Line:
    """By the name of the data, as verl does it by data_source."""
    if any("gsm8k" in setting.shown.lower() for setting in foreign.settings if "train" in setting.name):
        return Line("reward", "key", {"reward.function": "numeric"}, "GSM8K: the last number of the answer")
    return Line("reward", "open", note="the data decides there; give --set reward.function=...")
