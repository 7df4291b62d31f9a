"""`slipstream completion bash|zsh|fish`: completes commands, options, presets, keys and their values.

    bash   slipstream completion bash > ~/.local/share/bash-completion/completions/slipstream
    zsh    slipstream completion zsh > ~/.zfunc/_slipstream        (a folder of fpath, before compinit)
    fish   slipstream completion fish > ~/.config/fish/completions/slipstream.fish

The script holds all words, so completing starts no Python; print it again after an update.
"""

import argparse
import ast
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from configs.command import NAME, available, entry_module, program
from configs.loading import FLAGS, PRESETS
from configs.schema import Config

CONFIGURATION = ("--config", "--set", *FLAGS)
"""Options that `configs.loading.add_arguments` adds."""
HELP = "--help"

BASH = r"""# completions of @NAME@; made by `@NAME@ completion bash`
_@NAME@() {
  local line=${COMP_LINE:0:COMP_POINT} word before words cut i
  word=${line##*[[:space:]]}
  before=${line%"$word"}
  read -ra words <<<"$before"
  local previous=${words[${#words[@]}-1]} command=${words[1]}
  local commands='@COMMANDS@'
  local keys='@KEYS@'
  local presets='@PRESETS@'
  COMPREPLY=()
  if ((${#words[@]} == 1)); then
    COMPREPLY=($(compgen -W "$commands" -- "$word"))
    return
  fi
  case $previous in
    --set) COMPREPLY=($(compgen -W "$keys" -- "$word")) ;;
    --config)
      COMPREPLY=($(compgen -W "$presets" -- "$word") $(compgen -f -X '!*.yaml' -- "$word"))
      COMPREPLY+=($(compgen -d -S / -- "$word"))
      ;;
    *)
      case $command in
@OPTIONS@
      esac
      [[ $word == -* ]] || COMPREPLY+=($(compgen -f -- "$word"))
      ;;
  esac
  # the shell cuts a word at `=` and `:`: give what stands after the last of them
  cut=${word%"${word##*[=:]}"}
  [[ -n $cut ]] && for i in "${!COMPREPLY[@]}"; do COMPREPLY[i]=${COMPREPLY[i]#"$cut"}; done
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
}
complete -F _@NAME@ @NAME@
"""

ZSH = r"""#compdef @NAME@
# completions of @NAME@; made by `@NAME@ completion zsh`
_@NAME@() {
  local -a commands keys presets options
  commands=(@COMMANDS@)
  keys=(@KEYS@)
  presets=(@PRESETS@)
  if ((CURRENT == 2)); then
    compadd -a commands
    return
  fi
  case ${words[CURRENT-1]} in
    --set) compadd -S '' -a keys ;;
    --config) compadd -a presets; _files -g '*.yaml' ;;
    *)
      case ${words[2]} in
@OPTIONS@
      esac
      if [[ ${words[CURRENT]} == -* ]]; then compadd -a options; else _files; fi
      ;;
  esac
}
compdef _@NAME@ @NAME@
"""

FISH = """# completions of {name}; made by `{name} completion fish`
complete -c {name} -n __fish_use_subcommand -f -a '{commands}'
complete -c {name} -n "__fish_seen_subcommand_from {taking}" -l config -x -a '{presets} (__fish_complete_suffix .yaml)'
complete -c {name} -n "__fish_seen_subcommand_from {taking}" -l set -x -a '{keys}'
{options}
"""


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """`section.key=` of every key, and `section.key=value` where the schema names its values."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}="
        yield from (f"{prefix}{name}={value}" for value in choices(kind))


def choices(kind: Any) -> list[str]:
    """The values of a type that has few, as YAML writes them; empty for all others."""
    if kind is bool:
        return ["false", "true"]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType):
        return [value for part in get_args(kind) for value in choices(part)]
    return []


def options_of(module: str) -> list[str]:
    """Options of a module's parser, read from its source: importing it may take seconds.

    Example: options_of("learner.report.lag") == ["--help"]
    """
    spec = importlib.util.find_spec(entry_module(module))
    if spec is None or spec.origin is None:
        return []
    found: list[str] = []
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "add_arguments":
            found += CONFIGURATION
        elif called in ("add_argument", "add"):
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found += [word for word in words if isinstance(word, str) and word.startswith("--")]
    return sorted({*found, HELP})


def script(shell: str) -> str:
    """The completion script of `bash`, `zsh` or `fish`."""
    presets = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    options = {name: options_of(command.module) for name, command in available().items()}
    options["completion"] += ["bash", "zsh", "fish"]
    options["launch"] += ["learner", "rollout"]
    if shell == "fish":
        return FISH.format(
            name=NAME,
            commands=" ".join(available()),
            taking=" ".join(name for name, words in options.items() if "--set" in words),
            presets=" ".join(presets),
            keys=" ".join(keys()),
            options="\n".join(_fish_options(options)),
        )
    line = {
        "bash": '        {}) COMPREPLY=($(compgen -W "{}" -- "$word")) ;;',
        "zsh": "        {}) options=({}) ;;",
    }[shell]
    cases = "\n".join(line.format(name, " ".join(words)) for name, words in options.items())
    values = {"COMMANDS": " ".join(available()), "KEYS": " ".join(keys()), "PRESETS": " ".join(presets)}
    text = {"bash": BASH, "zsh": ZSH}[shell]
    for word, value in {**values, "OPTIONS": cases, "NAME": NAME}.items():
        text = text.replace(f"@{word}@", value)
    return text


def _fish_options(options: dict[str, list[str]]) -> Iterator[str]:
    for name, words in options.items():
        for word in words:
            given = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            if word not in ("--config", "--set"):
                yield f'complete -c {NAME} -n "__fish_seen_subcommand_from {name}" {given}'


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script."""
    parser = argparse.ArgumentParser(
        prog=program("configs.command.completion"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    sys.stdout.write(script(parser.parse_args(argv).shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
