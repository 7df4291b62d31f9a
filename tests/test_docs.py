"""The written pages say what is there: links, commands, flags, files, keys, messages and the tests that they name."""

import argparse
import ast
import contextlib
import functools
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from configs.base import ConfigError
from configs.loading import add_arguments, from_arguments, leaf_keys, load
from configs.schema import Config
from learner import main as launcher
from replay import messages as replay_messages
from slipstream.check import checks
from slipstream.command import COMMANDS as COMMANDS_BY_NAME
from slipstream.runtime.vitals.catalogue import catalogue
from slipstream.translate.names import ALIASES, WITHOUT
from weight_bus import messages as bus_messages

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "slipstream", "replay", "rollout_server", "learner", "weight_bus")
FOLDERS = tuple(ROOT / "docs" / name for name in (".", "howto", "recipes", "migration", "reference", "tutorials"))
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]
GENERATED = {"configuration.md", "metrics.md"}
VARIANTS = ("algorithm.loss.", "algorithm.correction.", "algorithm.advantage.", "algorithm.distillation.")
MAPPINGS = ("rollout.sglang.", "network.env.", "teachers.", *VARIANTS)
"""Sections whose keys are options, names of a user, or those of SGLang and of processes."""
RUNNERS = {"learner.main", "rollout_server.main", "replay.main", "slipstream.launch.doctor"}
SIDES = {"run": "learner.main", "learner": "learner.main", "rollout": "rollout_server.main"}
"""What `slipstream launch` passes arguments on to."""
FIRST_REWARD = re.findall(r"^```python\n(# reward\.py\n.*?)^```", PAGES[0].read_text(), re.MULTILINE | re.DOTALL)[0]
"""What the README trains on."""
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_is_in_its_reference():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)", row.split(" | ")[0])}
    assert {*COMMANDS_BY_NAME} <= named <= {*COMMANDS_BY_NAME} | {"slipstream"}


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            is_there = re.match(r"[a-z]+:", target) or (file.exists() and (not anchor or anchor in anchors(file)))
            broken += [] if is_there else [f"{name_of(page)}: {target}"]
    assert broken == []


def test_the_index_lists_every_page():
    listed = set(re.findall(r"\]\((\w[\w/-]*\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert listed == pages


# ---- commands -------------------------------------------------------------------------------------------


def started(words: list[str]) -> list[str]:
    """Module or script of a command, and its arguments; `slipstream NAME` is the module of NAME."""
    if words[0] == "slipstream":
        command = COMMANDS_BY_NAME[words[1]]
        return [command.module, *command.first, *words[2:]]
    return words[2:] if words[:2] == ["python", "-m"] else words[1:]


def runner(words: Sequence[str]) -> str:
    """The module that takes the arguments of a command in the end."""
    return SIDES[words[1]] if words[0] == "slipstream.launch" else words[0]


def commands() -> Iterator[tuple[str, ...]]:
    """(module or script, arguments) of every command in a bash block; leading PORT=5757 and the like are left out.

    Those of tutorials and migrations are run as they stand: tests/e2e/test_tutorials.py, test_migration_pages.py.
    """
    for page in [page for page in PAGES if page.parent.name not in ("tutorials", "migration")]:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
                words = shlex.split(line.rpartition(" && ")[2], comments=True)  # after `git clone ... && cd ...`
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    allowed = ("python", "bash", "slipstream")
                    assert words[0] in allowed, f"{words}: pages show {', '.join(allowed)}"
                    yield tuple(started(words))


COMMANDS = list(dict.fromkeys(commands()))


@functools.cache
def help_of(module: str) -> str:
    shown, before = io.StringIO(), sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module may be imported already
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return shown.getvalue()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_exist_and_take_these_flags(words):
    target, *arguments = words
    known = (ROOT / target).read_text(encoding="utf-8") if target.endswith(".sh") else help_of(target)
    known += help_of(runner(words)) if runner(words) != target else ""
    for flag in [word.split("=")[0] for word in arguments if word.startswith("-")]:
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known), f"{target} has no {flag}"


@pytest.mark.parametrize("words", [words for words in COMMANDS if runner(words) in RUNNERS], ids=" ".join)
def test_what_is_shown_can_start(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(FIRST_REWARD)
    if words[0] == "learner.main" and not {"--config", "--replay", "--resume"} & set(words):
        monkeypatch.setattr(sys, "argv", [*words, "--dry-run"])
        assert launcher.main() == 0
        said = capsys.readouterr().err
        assert "trajectories a step" in said and "dry run" in said
    else:  # the data is the reader's
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(parser)
        args = parser.parse_known_args(words[1:])[0]
        if args.config.startswith("examples/"):  # of a clone
            args.config = str(ROOT / args.config)
        if not args.config.startswith("runs/"):  # the reader's run
            from_arguments(args)


# ---- files and keys -------------------------------------------------------------------------------------


def test_files_and_tests_that_are_named_exist():
    folders, missing = "|".join((*PACKAGES, "scripts", "tests", "benchmarks", "examples")), []
    for page in [page for page in PAGES if page.name not in GENERATED]:
        for path, function in re.findall(rf"`((?:{folders})/[\w/.-]*)(?:::(\w+))?`", prose(page)):
            file = ROOT / path
            if not file.exists() or (function and f"def {function}(" not in file.read_text(encoding="utf-8")):
                missing.append(f"{name_of(page)}: {path}::{function}")
    assert missing == []


def test_what_does_not_go_together_is_refused():
    page = (ROOT / "docs" / "howto" / "memory.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[^|]*) \| ([^|]*) \|$",
        page.partition("\n### What does not go together\n")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    pairs = [(this[1:-1], other) for this, others in rows for other in re.findall(r"`([^`]+)`", others)]
    assert len(pairs) >= 11
    for setting in {*sum(pairs, ())}:
        load("quickstart", [setting])  # by itself it can be
    for pair in pairs:
        with pytest.raises(ConfigError):
            list(checks.algorithm(checks.Subject(load("quickstart", pair))))


def test_keys_that_are_named_exist():
    sections, unknown = "|".join(Config.model_fields), []
    modules = [path.relative_to(ROOT).with_suffix("") for package in PACKAGES for path in (ROOT / package).rglob("*")]
    blocks = {key.rpartition(".")[0] for key in leaf_keys()}
    known = {*leaf_keys(), *blocks, *(".".join(module.parts) for module in modules)}
    for page in PAGES:
        # the table of names holds those of other systems in all columns but the first
        text, _, foreign = prose(page).partition("\n## Names of other frameworks\n")
        text += "\n".join(line.split("|")[1] for line in foreign.splitlines() if line.startswith("|"))
        named = re.findall(rf"`((?:{sections})\.[a-z_.]*[a-z_])(?:(?:=|: )[^`]*)?`", text)
        foreign_names = {*ALIASES, *WITHOUT} if page.parent.name == "migration" else set()
        allowed = known | foreign_names
        unknown += [f"{name_of(page)}: {key}" for key in named if key not in allowed and not key.startswith(MAPPINGS)]
    assert unknown == []


# ---- messages -------------------------------------------------------------------------------------------


def section_of_protocol(heading: str) -> str:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    return re.split(r"^## ", page.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]


def test_every_message_is_in_the_protocol():
    replay = {*replay_messages.TO_REPLAY, *replay_messages.FROM_REPLAY}
    bus = {*bus_messages.TO_PUBLISHER, *bus_messages.TO_SUBSCRIBER, *bus_messages.TO_SENDER}
    for heading, messages in (("## Replay", replay), ("## Weight bus", bus)):
        assert set(re.findall(r"^\| `([A-Z]\w+)` \|", section_of_protocol(heading), re.MULTILINE)) == messages


def test_the_schema_of_status_is_written_down():
    section = section_of_protocol("### Schema of Status.state")
    nodes = ast.walk(ast.parse((ROOT / "replay" / "status.py").read_text(encoding="utf-8")))
    (state,) = [node.value for node in nodes if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)]
    keys = {key.value for node in ast.walk(state) if isinstance(node, ast.Dict) for key in node.keys if key}
    assert {key for key in keys if f"`{key}`" not in section} == set()


def texts_in_the_code(packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    """Every string of the packages, f-strings with `…` where a value stands."""
    for path in [path for package in packages for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield without_values("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield without_values(node.value)


def without_values(text: str) -> str:
    """`…` for what a logger fills in, and for a quoted `…`."""
    return re.sub(r"'…'", "…", re.sub(r"%[-.0-9]*[srdgf]", "…", text))


# ---- metrics --------------------------------------------------------------------------------------------

PREFIXES = "critic actor response_length prompt_length timing_s perf training val-core val-aux rollout trainer buffer"
PREFIXES += " weight_sync reward episode answers metrics guards checkpoint rollout_corr prompts replay vitals moe sft"
PREFIXES += " distill teacher dpo eval"
NAME = re.compile(rf"({'|'.join(PREFIXES.split())})(/[^/\s*]+)+")


MEASURED = ("learner", "replay", "weight_bus", "slipstream/runtime")


def test_docs_and_code_have_the_same_metric_names():
    listed = [metric for metric in catalogue() if metric.when != "at endpoints alone"]
    documented = [re.sub(r"<[^>]*>", "…", metric.name) for metric in listed]
    assert len(documented) == len(set(documented)), "a name stands twice in slipstream/runtime/vitals/catalogue.yaml"
    sources = [path.read_text(encoding="utf-8") for name in MEASURED for path in (ROOT / name).rglob("*.py")]
    spans = {f"timing_s/{name}" for source in sources for name in re.findall(r"\b_?span\(\"(\w+)\"", source)}
    in_code = spans | {name for name in texts_in_the_code(MEASURED) if NAME.fullmatch(name)} - {"timing_s/…"}
    assert in_code - set(documented) == set(), "add these to slipstream/runtime/vitals/catalogue.yaml"
    assert set(documented) - in_code == set(), "no module writes these; remove them from catalogue.yaml"


def test_messages_in_troubleshooting_are_those_of_the_code():
    page = (
        (ROOT / "docs" / "troubleshooting.md")
        .read_text(encoding="utf-8")
        .partition("\n## A run that stands still\n")[0]
    )
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    shown = {message for cell in cells for message in re.findall(r"`([^`]+)`", cell)}
    assert len(shown) > 20
    patterns = {}
    for message in shown:
        pieces = [piece for piece in re.split(r"\s*…\s*", without_values(message)) if piece]
        assert max(map(len, pieces)) >= 5, f"{message}: nothing to look for, show more of it"
        patterns[message] = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    texts = list(texts_in_the_code())
    assert [message for message, pattern in patterns.items() if not any(map(pattern.search, texts))] == []
