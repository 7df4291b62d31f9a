"""YAML in, overrides on top, a checked `Config` out; errors name the key, the value and a suggestion."""

import argparse
import difflib
import functools
import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from configs.base import ConfigError as ConfigError
from configs.errors import BadFile, BadOption, BadValue, Contradiction, UnknownKey, coded
from configs.errors import did_you_mean as did_you_mean
from configs.schema import Config
from configs.variants import SCHEMA

PRESETS = Path(__file__).parent
QUICKSTART = "quickstart"
FLAGS = {
    "--async-lag": "replay.async_lag",
    "--seed": "run.seed",
    "--steps": "learner.total_steps",
    "--name": "run.name",
    "--model": "model.path",
    "--data": "data.train",
    "--engine": "rollout.engine",
    "--split": "placement.split",
    "--profile": "tracking.profile",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars, and no key twice. YAML 1.1, PyYAML's own, reads a split of 1:1 as 61, `off` as false and 5e-4
    as text, and keeps the last of two values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(
                "in a mapping", node.start_mark, f"{twice[0]!r} stands there twice; remove or rename one", None
            )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rsplit(":", 1)[1] not in ("bool", "int", "float", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """As YAML 1.2 has it: a leading 0 is no sign of an octal number."""
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read as text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


class Parser(argparse.ArgumentParser):
    """Answers a bare `a.b=c`, the habit of other frameworks, with the option that it belongs to."""

    def answer(self, name: str) -> tuple[str, str]:
        """(key, what to say) of a word that is no option; slipstream/translate/refusals.py knows other frameworks."""
        return (name if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", name) else "", "")

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
        notes, settings = [], []
        for word in words:
            name, equals, value = word.partition("=")
            key, said = self.answer(name)
            notes += [f"{name}: {said}"] if said else []
            if key and (equals or said):
                settings.append(f"--set {key}={value or '...'}")
        said = "; ".join([message, *notes, *([f"write {' '.join(settings)}"] if settings else [])])
        super().error(coded(said, BadOption.code))


def read_yaml(text: str | bytes) -> Any:
    """Plain data of a YAML text. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # of a tag that the text does not fit: !!int x
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


class _OneFile(argparse.Action):
    """Refuses a second `--config`, which would drop the first one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if namespace.is_config_given:
            parser.error(
                f"--config: {namespace.config} and {values}; one file holds one run: give one, and --set keys of it"
            )
        namespace.config, namespace.is_config_given = values, True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, `--set` and the flags that are aliases of single keys."""
    parser.set_defaults(is_config_given=False)
    help_text = "YAML file or preset name (default: %(default)s)"
    parser.add_argument("--config", action=_OneFile, default=QUICKSTART, help=help_text)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    for flag, key in FLAGS.items():
        parser.add_argument(flag, dest=f"flag:{key}", metavar="VALUE", help=f"same as --set {key}=VALUE")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """`--set` of parsed arguments, after the flags that stand for one."""
    flags = [f"{key}={value}" for key in FLAGS.values() if (value := getattr(args, f"flag:{key}")) is not None]
    return [*flags, *args.set]


def from_arguments(args: argparse.Namespace) -> Config:
    """Load the configuration that parsed arguments describe. Raises ConfigError."""
    return load(args.config, overrides_of(args))


def load(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, or a preset by its name, and apply `a.b=c` overrides (values are YAML).

    Raises:
        ConfigError: file missing, YAML broken, key unknown, or a value refused.
    """
    path = find(source)
    return parse(path.read_bytes(), str(path), overrides)


def parse(text: str | bytes, source: str, overrides: Sequence[str] = ()) -> Config:
    """The same of a YAML text that comes from `source`. Raises ConfigError, also where no reward is named."""
    try:
        tree = read_yaml(text)
    except yaml.YAMLError as error:
        raise BadFile(f"{source}: not readable as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise BadFile(f"{source}: expected a mapping of sections, found {type(tree).__name__}")
    for override in overrides:
        apply_override(tree, override)
    config = validate(tree, source, overrides)
    if config.reward.function is None and config.needs_servers:
        raise BadValue(
            f"{source}: reward.function: names nothing, and no reward is chosen for you; name what judges the answers:"
            " numeric, math, exact, code, path/to/file.py:function, or environment where environment.function gives the"
            " reward (docs/howto/rewards.md)"
        )
    return config


def find(source: str | os.PathLike[str]) -> Path:
    """The YAML file behind a path or a preset name. Raises ConfigError with the presets there are."""
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESETS / f"{path.name.removesuffix('.yaml')}.yaml"
    if len(path.parts) == 1 and preset.is_file():
        return preset
    names = sorted(p.stem for p in PRESETS.glob("*.yaml"))
    hint = did_you_mean(path.stem, names) or "give one that there is."
    raise BadFile(f"--config: no file or preset {str(source)!r}; {hint} Presets: {', '.join(names)}")


def digest_of(text: str) -> str:
    """Digest of a configuration's text, by which a job names the one that it was written with: 16 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in the tree, in place. Raises ConfigError when it is not of that form."""
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise BadOption(f"--set {override!r}: expected section.key=value, such as --set replay.async_lag=1")
    try:
        value = read_yaml(raw) if raw else ""
    except yaml.YAMLError as error:
        raise BadOption(f"--set {override!r}: the value is not readable: {error}") from error
    try:
        put(tree, ".".join(parts), value)
    except BadOption as error:
        raise BadOption(f"--set {override!r}: {error}") from error


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key, in place; below a key of variants it chooses one. Raises BadOption."""
    parts, node = key.split("."), tree
    for number, (part, below) in enumerate(itertools.pairwise(parts), 1):
        whole, child = ".".join(parts[:number]), node.setdefault(part, {})
        is_other = whole in VARIANTS and not (isinstance(child, dict) and below in child)
        if child == below or is_other:  # a variant by name gets options
            child = node[part] = {below: {}}
        if not isinstance(child, dict):
            given = functools.reduce(lambda inner, name: {name: inner}, reversed(parts[number:]), value)
            raise BadOption(
                f"{part!r} is a value, not a section; give what is to stand there as a whole, such as --set"
                f" {shlex.quote(f'{whole}={inline(given)}')}"
            )
        node = child
    node[parts[-1]] = value


def validate(tree: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Check a tree against the schema, for `overrides` that were applied to what `source` holds.

    Raises:
        ConfigError: with every problem, one a line, each with the file or the `--set` that it comes from.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors()]
    texts = [text for problem in problems for text in _explain(problem)]
    kinds = {_kind(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    refusal = kind("\n".join(f"{_origin(text, overrides)}{source}: {text}" for text in texts))
    refusal.unknown = [name for problem in problems if _kind(problem) is UnknownKey for name, _ in _unknown(problem)]
    raise refusal


def _kind(problem: dict[str, Any]) -> type[ConfigError]:
    """The error of one problem: keys that do not go together are found in a section or in the whole tree."""
    if problem["type"] == "extra_forbidden":
        return UnknownKey
    if isinstance(found := problem.get("ctx", {}).get("error"), ConfigError):
        return type(found)
    return Contradiction if problem["type"] == "value_error" and len(problem["loc"]) < 2 else BadValue


def _explain(problem: dict[str, Any]) -> Iterator[str]:
    """What is wrong in one problem: one text, or one for each name below an unknown key."""
    key, value = ".".join(str(part) for part in problem["loc"]), problem["input"]
    if problem["type"] == "extra_forbidden":
        for name, given in _unknown(problem):
            yield f"{name}: unknown key (value {given!r}){suggestion(name)}"
    elif problem["type"] == "missing":
        yield f"{key}: missing; it has no default, give it in the file or with --set {key}=..."
    else:
        text = str(problem["msg"]).removeprefix("Value error, ")
        yield f"{key}: {text} (value {value!r})" if key else text


def _unknown(problem: dict[str, Any]) -> list[tuple[str, Any]]:
    """The unknown key with its value, or each of those below it."""
    key, value = ".".join(str(part) for part in problem["loc"]), problem["input"]
    below = leaves(value, f"{key}.") if isinstance(value, dict) else {}
    return list(below.items()) or [(key, value)]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _origin(text: str, overrides: Sequence[str]) -> str:
    """The overrides that a text speaks of: of its key or section, or named anywhere in it."""
    key = text.partition(":")[0]
    given = []
    for override in overrides:
        name = override.partition("=")[0].strip()
        is_near = f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
        if is_near or re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text):
            given.append(f"--set {override}")
    return f"{' '.join(given)} over " if given else ""


def suggestion(key: str) -> str:
    """`; did you mean 'a.b'?` for an unknown key, or an empty string."""
    keys = leaf_keys()
    leaves = {known.rpartition(".")[2]: known for known in reversed(keys)}
    close = difflib.get_close_matches(key, keys, n=1) or [
        leaves[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.75)
    ]
    return f"; did you mean {close[0]!r}?" if close else "; every key stands in docs/configuration.md"


def leaf_keys() -> list[str]:
    """All keys of the tree, dotted."""
    return list(_leaf_fields(Config))


def _leaf_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _leaf_fields(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


VARIANTS = frozenset(key for key, field in _leaf_fields(Config).items() if SCHEMA in field.metadata)
"""Keys that name one of several variants."""


def inline(value: Any) -> str:
    """A value on one line of YAML, as `read_yaml` reads it."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def dump(config: Config) -> str:
    """The resolved configuration as YAML; loading it again gives the same Config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)
