"""Which framework a file belongs to, and its settings in the order of the file."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.loading import inline, read_yaml
from slipstream.translate import shell, trl_script
from slipstream.translate.settings import Foreign, Setting, Untranslatable, leaves

VERL = re.compile(r"(verl|recipe)(\.\w+)+|(.*/)?main_ppo\.py")
"""The module that a command starts; the folder of a recipe says how both sides take turns."""
SLIME = re.compile(r"(^|/)train(_async)?\.py$")
VERL_SECTIONS = {
    "actor_rollout_ref",
    "trainer",
    "algorithm",
    "data",
    "critic",
    "reward_model",
    "custom_reward_function",
}
OURS = {"replay", "learner", "weight_bus", "placement"}
AREAL = {"gconfig", "actor"}
PARTS = {"orch": "orchestrator.", "infer": "inference.", "train": "trainer."}
"""Files of a prime-rl set, by what their names hold."""
SECTIONS = {"orchestrator", "trainer", "inference", "deployment"}
"""Of one prime-rl file that holds all."""
FURTHER = "of environment {}, and a run has one here, the first; docs/howto/data.md mixes datasets"
"""Of settings in a list of several tables."""
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:, ?([^{}]*))?\}")


def read(paths: Sequence[Path]) -> Foreign:
    """The settings of one file, or of a set of TOML files. Raises Untranslatable."""
    if len(paths) > 1 and any(path.suffix != ".toml" for path in paths):
        names = ", ".join(str(path) for path in paths)
        raise Untranslatable(f"{names}: several files are taken of prime-rl alone, and end in .toml; give one")
    texts = {path: _text(path) for path in paths}
    (path, text), *_ = texts.items()
    if path.suffix == ".toml":
        return _prime_rl(texts)
    if path.suffix == ".py":
        return trl_script.read(path, text)
    if path.suffix == ".json":
        return _trl_json(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    return _script(path, text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Untranslatable(f"{path}: not readable: {error}; name a text file") from error


# ---- verl, AReaL and TRL: resolved files -------------------------------------------------------------------


def _trl_json(path: Path, text: str) -> Foreign:
    """What `GRPOConfig.to_json_string()` writes: all settings, most of them defaults."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise Untranslatable(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(tree, dict) or "num_generations" not in tree:
        raise Untranslatable(f"{path}: no num_generations in it, so TRL's GRPOConfig has not written it")
    settings = [Setting(name, value, f"{name}: {inline(value)}") for name, value, _ in leaves(tree)]
    return Foreign("TRL", (str(path),), settings, is_whole=True)


def _yaml(path: Path, text: str) -> Foreign:
    try:
        tree = read_yaml(text)
    except yaml.YAMLError as error:
        raise Untranslatable(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise Untranslatable(f"{path}: a mapping of sections is needed, not {type(tree).__name__}")
    if OURS & tree.keys():
        raise Untranslatable(
            f"{path}: has sections of Slipstream already ({sorted(OURS & tree.keys())[0]}); give it to --config"
        )
    framework = "AReaL" if tree.keys() >= AREAL else "verl"
    if framework == "verl" and not VERL_SECTIONS & tree.keys():
        raise Untranslatable(f"{path}: none of verl's sections ({', '.join(sorted(VERL_SECTIONS))}) is in it")
    values = {name: value for name, value, _ in leaves(tree)}
    settings = []
    for name, value in values.items():
        filled = _referred(value, values)
        is_open = isinstance(filled, str) and ("${" in filled or filled == "???")  # OmegaConf's missing value
        settings.append(Setting(name, filled, f"{name}: {inline(value)}", str(filled) if is_open else ""))
    return Foreign(framework, (str(path),), settings, is_whole=True)


def _referred(value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """`${a.b}` of OmegaConf, where the file has a.b."""
    if not isinstance(value, str) or depth > 8:
        return value
    if (whole := REFERENCE.fullmatch(value)) is not None:
        if whole[1] in values:
            return _referred(values[whole[1]], values, depth + 1)
        return value if whole[2] is None else read_yaml(whole[2])
    return REFERENCE.sub(lambda found: str(values.get(found[1], found[0])), value)


# ---- scripts -----------------------------------------------------------------------------------------------


def _script(path: Path, text: str) -> Foreign:
    # others name verl, too (its folder, its model_merger, an echo): the one with settings of a run starts it
    commands = sorted(shell.commands(text, str(path)), key=_sets_nothing)
    for words in commands:
        if (start := next((at for at, word in enumerate(words) if VERL.fullmatch(word)), -1)) >= 0:
            found = Foreign("verl", (str(path),), [_override(word) for word in words[start + 1 :] if "=" in word])
            *_, recipe, _ = ["", *words[start].split(".")[1:-1], ""]
            if recipe.endswith("_policy"):
                found.settings.insert(0, Setting("recipe", recipe, words[start]))
        elif (start := next((number for number, word in enumerate(words) if SLIME.search(word)), -1)) >= 0:
            elsewhere = [word for word in words if shell.ARRAY.fullmatch(word)]
            kept = [word for word in words[start + 1 :] if word not in elsewhere]
            found = Foreign("slime", (str(path),), _options(kept))
            program = words[start].rpartition("/")[2]
            found.settings.insert(0, Setting("recipe", program, program))
            found.remarks += [f"{word} is filled by another file, which was not read" for word in elsewhere]
        else:
            continue
        if re.search(r"^\s*(if|case|for)\b", text, re.MULTILINE):
            found.remarks.append("the script has conditions or loops: all of it was read, and the last value counts")
        return found
    raise Untranslatable(
        f"{path}: no command starts verl (python -m verl.trainer.main_ppo) or slime (train.py, train_async.py); give a"
        " .toml of prime-rl, a .py of TRL, a .yaml of verl, or a script with such a command"
    )


def _sets_nothing(words: Sequence[str]) -> bool:
    """Whether none of the words sets a key of verl."""
    return not any("=" in word and word.lstrip("+~").partition(".")[0] in VERL_SECTIONS for word in words)


def _override(word: str) -> Setting:
    """`+a.b=c` of hydra."""
    name, _, raw = word.partition("=")
    return _setting(name.lstrip("+~"), raw, f"{name}={raw}")


def _setting(name: str, raw: str, shown: str) -> Setting:
    found = shell.UNKNOWN.search(raw)
    try:
        value = read_yaml(raw) if raw else ""
    except yaml.YAMLError:
        value = raw
    if value in ("True", "False", "None"):
        value = {"True": True, "False": False, "None": None}[value]
    return Setting(name, value, shown, raw if found else "")


def _options(words: Sequence[str]) -> list[Setting]:
    """`--name value ...`, `--name=value` and `--switch` of argparse."""
    settings, number = [], 0
    while number < len(words):
        word = words[number]
        number += 1
        if not word.startswith("--"):
            continue
        values = []
        while number < len(words) and not words[number].startswith("--"):
            values.append(words[number])
            number += 1
        name, equals, raw = word.partition("=")
        if equals:
            values = [raw, *values]
        shown = " ".join([name, *values])
        if len(values) > 1:
            is_open = any(shell.UNKNOWN.search(value) for value in values)
            settings.append(Setting(name, values, shown, shown if is_open else ""))
        else:
            settings.append(_setting(name, values[0] if values else "true", shown))
    return settings


# ---- prime-rl ----------------------------------------------------------------------------------------------


def _prime_rl(texts: Mapping[Path, str]) -> Foreign:
    found = Foreign("prime-rl", tuple(str(path) for path in texts))
    for path, text in texts.items():
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Untranslatable(f"{path}: not readable as TOML: {error}") from error
        part = next((prefix for name, prefix in PARTS.items() if name in path.stem), "")
        prefix = "" if SECTIONS & tree.keys() else part
        if not prefix and not SECTIONS & tree.keys():
            raise Untranslatable(
                f"{path}: none of prime-rl's sections ({', '.join(sorted(SECTIONS))}) is in it, and its name does not"
                " say which part it is (orchestrator, trainer or inference); rename it"
            )
        for name, value, number in leaves(tree, prefix):
            if value != {}:  # `[trainer]` alone
                further = FURTHER.format(number + 1) if number and ".env." in name else ""
                found.settings.append(Setting(name, value, f"{name} = {inline(value)}", further))
    return found
