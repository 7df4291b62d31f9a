"""The tree of errors: codes, their page, where they stand in a message, and that every raise has one."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import (
    CODE,
    BadPlacement,
    BadValue,
    ConfigError,
    Contradiction,
    SlipstreamError,
    UnknownKey,
    coded,
)
from configs.loading import load
from replay.data.rows import DataError, RowError
from slipstream.command import errors as __main__
from slipstream.command.errors import CODES

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner", "examples/trl")
NOT_OURS = {
    # Python's own: a caller within the package answers with an error of the tree, or it is a fault of ours
    "AssertionError", "AttributeError", "BrokenPipeError", "EOFError", "ImportError", "KeyError", "NotImplementedError",
    "OSError", "ProcessLookupError", "RuntimeError", "TypeError", "ValueError", "queue.Empty",
    "yaml.YAMLError", "yaml.constructor.ConstructorError",
    # never shown: they end an inner loop, or are answers in another protocol's form
    "_Again", "_TooLong", "ApiError", "HttpError", "Interrupted", "NearLimit", "GoodbyeReceived",
}  # fmt: skip
PLAIN_RAISES = 236
"""Most raises of such classes: what a user meets is none of them, so this number only falls."""


def classes() -> dict[str, tuple[set[str], bool]]:
    """By name of a class that is raised or derived from: its bases, and whether it has a code."""
    found: dict[str, tuple[set[str], bool]] = {"SlipstreamError": (set(), True)}
    for node in (node for _, nodes in trees() for node in nodes if isinstance(node, ast.ClassDef)):
        has_code = any(word.arg == "code" for word in node.keywords)
        found[node.name] = {ast.unparse(base) for base in node.bases}, has_code
    return found


@functools.cache
def trees() -> list[tuple[str, list[ast.ClassDef | ast.Raise]]]:
    """By file, what of it the test looks at."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.Raise)]
        found.append((str(path.relative_to(ROOT)), nodes))
    return found


def test_every_code_is_explained_and_that_of_one_class():
    sources = [path for package in (*PACKAGES, "scripts", "examples") for path in (ROOT / package).rglob("*.py")]
    used = [code for path in {*sources} for code in re.findall(r'code="(SLIP-[^"]+)"', path.read_text("utf-8"))]
    assert sorted(used) == sorted(CODES) and len(used) > 70
    assert [code for code in CODES if not CODE.fullmatch(f"[{code}]")] == []
    texts = [text for entry in CODES.values() for text in (entry["symptom"], entry["cause"], entry["mend"])]
    assert [text for text in texts if len(text) < 20 or not text.endswith(".")] == []


def test_every_raise_has_a_code():
    """Of a class of the tree, or of Python's own where it never leaves the package."""
    known, unknown, plain = classes(), [], Counter[str]()

    def is_ours(name: str) -> bool:
        bases, has_code = known.get(name, (set(), False))
        return has_code or any(is_ours(base) for base in bases)

    for name, nodes in trees():
        for node in nodes:
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            raised = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if {raised, f"{name}:{raised}"} & NOT_OURS:
                plain[raised] += 1
            elif re.fullmatch(r"[A-Z]\w+", raised) and not is_ours(raised):
                unknown.append(f"{name}:{node.lineno}: {raised}")
    assert unknown == [], "derive it from configs.errors.SlipstreamError, with a code"
    assert sum(plain.values()) <= PLAIN_RAISES, plain


def test_the_code_ends_the_first_line_and_the_innermost_counts():
    assert str(DataError("data.train: x")) == "data.train: x [SLIP-DATA-01]"
    inner = RowError("row 3: no prompt")
    outer = ConfigError(f"data.eval: {inner}; mend it\nand look again")
    assert str(outer) == "data.eval: row 3: no prompt; mend it [SLIP-DATA-02]\nand look again"
    assert issubclass(DataError, SlipstreamError) and issubclass(DataError, ValueError)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]))), st.booleans())
def test_a_message_keeps_its_words_and_has_one_code(lines: list[str], twice: bool):
    text = "\n".join(lines)
    if CODE.search(text):
        return
    said = coded(text, "SLIP-BUS-01")
    said = coded(f"again: {said}", "SLIP-NET-01") if twice else said
    assert CODE.findall(said) == ["SLIP-BUS-01"] and said.partition("\n")[0].endswith(" [SLIP-BUS-01]")
    assert CODE.sub("", said).removeprefix("again: " if twice else "") == text


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["replay.async_lags=1"], UnknownKey),
        (["algorithm.advantage_epsilon=1"], UnknownKey),
        (["rollout.group_size=none"], BadValue),
        (["learner.target_kl=1"], Contradiction),
        (["replay.async_lags=1", "rollout.group_size=none"], ConfigError),
        (["placement.split=none:1"], BadPlacement),
    ],
)
def test_what_is_wrong_decides_the_code(overrides: list[str], kind: type[ConfigError]):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", overrides)
    assert type(caught.value) is kind and str(caught.value).partition("\n")[0].endswith(f"[{kind.code}]")


def test_a_code_is_explained(capsys):
    assert __main__.main(["[slip-net-02]"]) == 0
    said = capsys.readouterr().out
    assert "SLIP-NET-02" in said and "Cause: " in said and "Remedy: " in said
    assert __main__.main([]) == 0 and len(capsys.readouterr().out.splitlines()) == len(CODES)
    assert __main__.main(["SLIP-NET-99"]) == 2 and "did you mean 'SLIP-NET-" in capsys.readouterr().err
