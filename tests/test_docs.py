"""The written pages say what is there: links, commands, flags, files, keys, messages and the tests that they name."""

import argparse
import ast
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.loading import add_arguments, dump, from_arguments, leaf_keys, load
from configs.schema import Config
from replay import messages as replay_messages
from tests.support.runs import untrained_input
from weight_bus import messages as bus_messages

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "replay", "rollout_server", "learner", "weight_bus")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
GENERATED = {"configuration.md", "metrics.md"}
MAPPINGS = ("rollout.sglang.", "network.env.")
"""Sections whose keys are those of SGLang and of processes."""
RUNNERS = {"learner.main", "rollout_server.main", "replay.main"}
PASSED_ON = {"scripts/start_learner.sh": "learner.main", "scripts/start_rollout_nodes.sh": "rollout_server.main"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading, there are {sorted(anchors(file))}"


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w[\w/-]*\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert listed == pages


# ---- commands -------------------------------------------------------------------------------------------


def commands() -> Iterator[list[str]]:
    """(words) of every command in a bash block, without leading assignments such as PORT=5757.

    Those of the tutorial are run as they stand: tests/e2e/test_tutorial.py.
    """
    for page in PAGES:
        if page.name == "tutorial.md":
            continue
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if language != "bash":
                continue
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words


COMMANDS = list(dict.fromkeys(map(tuple, commands())))


def split_command(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """(module or script, arguments)."""
    if words[:2] == ("python", "-m"):
        return words[2], list(words[3:])
    assert words[0] == "bash", f"{words}: pages show `python -m module` and `bash scripts/x.sh` only"
    return words[1], list(words[2:])


@functools.cache
def help_of(target: str) -> str:
    """What `python -m target --help` prints, in this process: its imports are most of the command's time."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [target, "--help"])
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    assert not end.value.code
    return said.getvalue()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_exist_and_take_these_flags(words: tuple[str, ...]) -> None:
    target, arguments = split_command(words)
    if target.endswith(".sh"):
        text = (ROOT / target).read_text(encoding="utf-8")
    else:
        module = ROOT / target.replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), f"no module {target}"
        text = help_of(target)
    known = text + (help_of(PASSED_ON[target]) if target in PASSED_ON else "")
    for flag in [word.split("=")[0] for word in arguments if word.startswith("-")]:
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known), f"{target} has no {flag}"


@pytest.fixture(scope="module")
def a_user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as the pages assume it after a quick start: runs/quickstart, and the input of the preset."""
    folder = tmp_path_factory.mktemp("user")
    config = load("quickstart")
    untrained_input(folder / "data" / "sort6")
    (folder / config.run_dir).mkdir(parents=True)
    (folder / config.run_dir / "config.yaml").write_text(dump(config), encoding="utf-8")
    return folder


def starts(words: tuple[str, ...]) -> bool:
    target, arguments = split_command(words)
    return PASSED_ON.get(target, target) in RUNNERS and "--resume" not in arguments


@pytest.mark.parametrize("words", [*filter(starts, COMMANDS)], ids=" ".join)
def test_configurations_shown_are_accepted(
    words: tuple[str, ...], a_user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(a_user_folder)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    parsed, _ = parser.parse_known_args(split_command(words)[1])
    from_arguments(parsed)


def trains_the_quick_start(words: tuple[str, ...]) -> bool:
    target, arguments = split_command(words)
    return target == "learner.main" and "--config" not in arguments and "--replay" not in arguments


@pytest.mark.parametrize("words", [*filter(trains_the_quick_start, COMMANDS)], ids=" ".join)
def test_the_launcher_takes_what_is_shown(words: tuple[str, ...], a_user_folder: Path) -> None:
    command = [sys.executable, "-m", *words[2:], *(() if "--dry-run" in words else ("--dry-run",))]
    done = subprocess.run(
        command, cwd=a_user_folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "trajectories a step" in done.stderr and "dry run" in done.stderr


# ---- files and keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=name_of)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = prose(page)
    for path in re.findall(rf"`((?:{'|'.join((*PACKAGES, 'scripts', 'tests'))})/[\w/.-]*)(?:::\w+)?`", text):
        assert (ROOT / path).exists(), f"{path}: not there"
    for path, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"^(?:async )?def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path} has no {function}"
        )


def first_column(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_that_are_named_exist(page: Path) -> None:
    keys, sections = set(leaf_keys()), "|".join(Config.model_fields)
    # the table of names holds those of other systems in all columns but the first
    text = re.sub(r"(?ms)^## Names of other frameworks$.*", lambda found: first_column(found[0]), prose(page))
    for key, _ in re.findall(rf"`((?:{sections})\.[a-z_.]*[a-z_])((?:=|: )[^`]*)?`", text):
        module = ROOT / key.replace(".", "/")
        is_module = module.with_suffix(".py").exists() or (module / "__init__.py").exists()
        assert key in keys or key.startswith(MAPPINGS) or is_module, f"{key}: no such key"


# ---- messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Replay", "Weight bus"])
def test_every_message_is_in_the_protocol(kind: str) -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.partition(f"\n## {kind}\n")[2], flags=re.MULTILINE)[0]
    shown = set(re.findall(r"^\| `([A-Z]\w+)` \|", section, re.MULTILINE))
    if kind == "Replay":
        there = {*replay_messages.TO_REPLAY, *replay_messages.FROM_REPLAY}
    else:
        there = {*bus_messages.TO_PUBLISHER, *bus_messages.TO_SUBSCRIBER}
    assert shown == there


def test_the_schema_of_status_is_written_down() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.partition("### Schema of Status.state\n")[2], flags=re.MULTILINE)[0]
    (state,) = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "replay" / "status.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
    ]
    keys = {key.value for node in ast.walk(state) if isinstance(node, ast.Dict) for key in node.keys if key}
    assert {key for key in keys if f"`{key}`" not in section} == set()


@functools.cache
def texts_in_the_code() -> list[str]:
    """Every string of the packages, f-strings with `…` where a value stands."""
    texts = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                    texts.append(without_values("".join(parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(without_values(node.value))
    return texts


def without_values(text: str) -> str:
    """`…` for what a logger fills in, and for a quoted `…`."""
    return re.sub(r"'…'", "…", re.sub(r"%[-.0-9]*[srdgf]", "…", text))


def shown_messages() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", shown_messages())
def test_messages_in_troubleshooting_are_those_of_the_code(message: str) -> None:
    pieces = [piece for piece in re.split(r"\s*…\s*", without_values(message)) if piece]
    assert max(map(len, pieces)) >= 5, "nothing to look for: show more of the message"
    in_order = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(in_order.search(text) for text in texts_in_the_code()), "no string of the code has these pieces in order"
