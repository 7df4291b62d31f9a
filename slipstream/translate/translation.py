"""Every setting of a file as a line: a key here, a reason why there is none, or a key that the user has to decide.

Nothing is guessed: a key whose value follows from several settings, from the data or from the machine is named with
the reason, and has to be given with --set before a file is written.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.loading import apply_override, inline, leaf_keys, put
from slipstream.translate.converters import CONVERTERS, VALUES, has_critic
from slipstream.translate.names import BY_FRAMEWORK, NO_COUNTERPART, NOT_NEEDED, TABLES, ends, plain
from slipstream.translate.settings import Foreign, Kind, Line, Setting, can_mean, section_of
from slipstream.translate.teachers import line_of

SECRET = re.compile(r"(wandb|api|access|auth|hub|hf|swanlab|comet)_?(key|token)\b|password|secret", re.IGNORECASE)
DECISIONS = {name: (key, names[0]) for key, names in TABLES["decisions"].items() for name in names[1:]}
"""End of a name: (key that the user decides, why)."""
FOLLOWS = {"eps_clip_high": "eps_clip", "epsilon_high": "epsilon"}
"""Names that are, unset, what another name has."""
SWITCHES: Mapping[str, str] = TABLES["switches"]
PARTS = {part: reason for reason, parts in TABLES["parts"].items() for part in parts}
"""Parts of names that are of the framework's own machinery."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A file as lines and as a configuration."""

    foreign: Foreign
    lines: tuple[Line, ...]
    defaults: tuple[Line, ...]
    """Of what the file does not set, where the framework's default is not ours."""
    tree: dict[str, Any]
    sources: Mapping[str, str]
    """Key to the setting that it comes from."""
    undecided: Mapping[str, str]
    """Keys that the user has to give, with the reason."""


def translate(foreign: Foreign, overrides: Sequence[str] = ()) -> Translation:
    """Translate settings, then defaults that differ; overrides count most. Raises ConfigError."""
    lines = tuple(_of_the_loss([_line(setting, foreign) for setting in foreign.settings], foreign))
    chosen = {override.partition("=")[0].strip() for override in overrides}
    pairs, sources = _merged(lines)
    # a learning rate that the file gives is that of its own optimizer
    settled = {*chosen, *pairs} - ({"learner.lr"} - chosen)
    undecided = {line.decides: line.note for line in lines if line.decides and line.decides not in settled}
    lines = tuple(_overruled(line, pairs, sources) for line in lines)
    judged = {"reward.function"} if "environment.function" in chosen else set()
    defaults = tuple(_defaults(foreign, {*pairs, *chosen, *undecided, *judged}, pairs))
    for line in defaults:
        undecided |= {line.decides: line.note} if line.decides else {}
        pairs |= line.pairs
        sources |= dict.fromkeys(line.pairs, line.shown)
    if not {"reward.function", "environment.function"} & {*pairs, *chosen}:
        undecided.setdefault("reward.function", "the file does not say what judges the answers; name it")
    tree: dict[str, Any] = {}
    for key in sorted(pairs, key=len):  # a variant before its options
        if key not in undecided:
            put(tree, key, pairs[key])
    for override in overrides:
        apply_override(tree, override)
        sources[override.partition("=")[0].strip()] = "--set"
    return Translation(foreign, lines, defaults, tree, sources, undecided)


def _of_the_loss(lines: Sequence[Line], foreign: Foreign) -> Iterator[Line]:
    """Bounds are of the loss that the file takes; those that it does not have are not needed."""
    loss = _merged(lines)[0].get("algorithm.loss", "ppo_clip")
    for line in lines:
        pairs = _bounds_of(loss, line.pairs)
        others = [key for key in pairs if key.startswith("algorithm.loss.") and key.split(".")[2] != loss]
        if others == ["algorithm.loss.ppo_clip.clip_high"] and loss == "cispo":
            note = "frameworks differ in whether the bound is over 1 or over 0; here it is over 1"
            yield Line(line.shown, "open", note=note, decides="algorithm.loss.cispo.clip_high")
        elif others:
            yield Line(line.shown, "not needed", note=f"the loss is {loss}")
        else:
            yield replace(line, pairs=pairs)


def _bounds_of(loss: str, pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Of gspo they are called as those of ppo_clip there, with the same defaults."""
    old, new = r"\.ppo_clip\.(clip_low|clip_high)$", r".gspo.\1"
    return {re.sub(old, new, key) if loss == "gspo" else key: value for key, value in pairs.items()}


def _overruled(line: Line, pairs: Mapping[str, Any], sources: Mapping[str, str]) -> Line:
    """Epochs decide nothing where the file has a number of steps."""
    if line.kind != "open" or line.decides != "learner.total_steps" or line.decides not in pairs:
        return line
    return Line(line.shown, "not needed", note=f"{sources[line.decides]} decides")


def _merged(lines: Sequence[Line]) -> tuple[dict[str, Any], dict[str, str]]:
    """Keys with their values and sources; the last one counts, one key's own setting over one of two keys."""
    pairs: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: -len(line.pairs)):
        pairs |= line.pairs
        sources |= dict.fromkeys(line.pairs, line.shown)
    return pairs, sources


def _line(setting: Setting, foreign: Foreign) -> Line:
    if SECRET.search(plain(setting.name)):
        return Line(f"{setting.name} ...", "not needed", note="a secret is not copied")
    # both become comments of one line
    setting = replace(setting, shown=" ".join(setting.shown.split()), open=" ".join(setting.open.split()))
    if (of_teachers := line_of(setting, foreign)) is not None:
        return of_teachers
    names = list(_ends(setting.name, foreign))
    machinery = next((PARTS[part] for part in setting.name.split(".") if part in PARTS), "")
    if foreign.is_whole and setting.value is None and not any(None in VALUES.get(end, {}) for end in names):
        return Line(setting.shown, "not needed", note="unset there")
    if setting.open and machinery:
        return Line(setting.shown, "not needed", note=machinery)
    if setting.open:
        keys = BY_FRAMEWORK[foreign.framework]
        key = next((keys[end] for end in names if end in keys), "")
        other = None if key else _of_another_model(setting, foreign)
        return other or Line(setting.shown, "open", note=setting.open, decides=key)
    for look in (_by_value, _by_name):
        for end in names:
            if (found := look(end, setting, foreign)) is not None:
                return found
    if setting.name in leaf_keys():
        return Line(setting.shown, "key", {setting.name: setting.value})
    if machinery:
        return Line(setting.shown, "not needed", note=machinery)
    if foreign.is_whole and setting.value in (None, False, "", [], {}):
        return Line(setting.shown, "not needed", note="unset there")
    return _of_another_model(setting, foreign) or Line(setting.shown, "unknown")


def _by_value(end: str, setting: Setting, foreign: Foreign) -> Line | None:
    """What this value means there, where that is not itself."""
    shown, value = setting.shown, setting.value
    if end in SWITCHES and not foreign.is_on(SWITCHES[end]):
        return Line(shown, "not needed", note=f"{SWITCHES[end]} is off there")
    special = _special(VALUES.get(end, {}), value)
    if isinstance(special, str):
        return Line(shown, "not needed", note=special)
    if special is not None:
        return Line(shown, "key", special)
    return CONVERTERS[end](shown, value, foreign) if end in CONVERTERS else None


def _by_name(end: str, setting: Setting, foreign: Foreign) -> Line | None:
    """The key with the value as it is, or why there is none."""
    shown, value = setting.shown, setting.value
    if end in DECISIONS:
        key, why = DECISIONS[end]
        return Line(shown, "open", note=why, decides=key)
    if key := BY_FRAMEWORK[foreign.framework].get(end):
        if key.startswith("critic.") and not has_critic(foreign):
            return Line(shown, "not needed", note="grpo has no critic")
        return Line(shown, "key", {key: value})
    if end in NO_COUNTERPART:
        return Line(shown, "no counterpart", note=NO_COUNTERPART[end])
    return Line(shown, "not needed", note=NOT_NEEDED[end]) if end in NOT_NEEDED else None


def _special(meanings: Mapping[Any, Any], value: Any) -> Any:
    """The meaning of a value; True and 1 are two values."""
    same = (
        meaning
        for one, meaning in meanings.items()
        if one == value and isinstance(one, bool) == isinstance(value, bool)
    )
    return next(same, None)


def _ends(name: str, foreign: Foreign) -> Iterator[str]:
    """The ends of a name that the tables may be asked for."""
    return (end for end in ends(name) if can_mean(foreign.framework, plain(name), end))


def _of_another_model(setting: Setting, foreign: Foreign) -> Line | None:
    """What a setting of another model's section is that has no key; None: the policy's, or one that has to be named."""
    section = section_of(foreign.framework, plain(setting.name))
    if section is None or section.model == "evaluation":
        return None
    if section.switch or section.model == "teacher":
        is_missed = not section.switch or foreign.is_on(section.switch)
        kind: Kind = "no counterpart" if is_missed else "not needed"
        return Line(setting.shown, kind, note=f"the {section.model}'s, which there is none of here")
    parts = plain(setting.name).split(".")
    if section.model == "critic" and has_critic(foreign) and ("optim" in parts or "grad_clip" in parts):
        note = "the critic's; here it has the settings of the learner, but for critic.lr"
        return Line(setting.shown, "no counterpart", note=note)
    is_about_rewards = any(word != "reward_model" and word in section.words for word in parts[1:])
    if section.model == "reward model" and is_about_rewards:
        return None
    return Line(setting.shown, "not needed", note=f"the {section.model}'s, and not needed here")


def _defaults(foreign: Foreign, decided: set[str], pairs: Mapping[str, Any]) -> Iterator[Line]:
    """Lines for names that the file does not have, unless their keys are decided already."""
    named = {end for setting in foreign.settings if setting.value is not None for end in ends(setting.name)}
    loss = pairs.get("algorithm.loss", "ppo_clip")
    for name, value in TABLES["defaults"][foreign.framework].items():
        end = plain(name)
        if end in named or (end.rpartition(".")[2] in named and "." not in end):
            continue
        if end in FOLLOWS:
            value = foreign.value(FOLLOWS[end], default=value)
        line = _line(Setting(name, value, f"{name}: {inline(value)}"), foreign)
        if line.decides and line.decides not in decided:
            yield line
        # a bound of the framework's default loss is none of another loss, where it would be refused
        missing = {
            key: one
            for key, one in _bounds_of(loss, line.pairs).items()
            if key not in decided and (loss == "ppo_clip" or not key.startswith("algorithm.loss.ppo_clip"))
        }
        if missing:
            yield Line(line.shown, "key", missing, line.note)
