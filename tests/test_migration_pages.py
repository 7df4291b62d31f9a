"""docs/migration/*.md as a reader follows them: files, translations as printed, and commands, up to a dry run."""

import shlex
from pathlib import Path

import pytest

from configs.loading import load
from slipstream.check import checks
from slipstream.translate import __main__ as translate
from tests.test_docs import FENCE, ROOT, name_of
from tests.test_recipe_pages import commands, downloads, run, write_files

__all__ = ["downloads"]
PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    return [(language, text) for language, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def translation(page: Path) -> list[str]:
    """Arguments of the page's `slipstream translate`."""
    for language, text in blocks(page):
        words = shlex.split(text.replace("\\\n", "")) if language == "bash" else []
        if words[:2] == ["slipstream", "translate"]:
            return words[2:]
    raise AssertionError(f"{name_of(page)}: no translation")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_the_command_prints_and_writes(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    assert translate.main(translation(page)) == 0
    (shown,) = [text for language, text in blocks(page) if language == "text"]
    assert capsys.readouterr().out == shown
    (written,) = [text for _, text in blocks(page) if text.startswith("# Translated from ")]
    assert (tmp_path / "gsm8k.yaml").read_text(encoding="utf-8") == written
    load(tmp_path / "gsm8k.yaml")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_translates_passes_a_dry_run(page, downloads, monkeypatch, capfd):
    pytest.importorskip("math_verify", reason="needs the package math-verify (extra math)")
    monkeypatch.chdir(downloads)
    monkeypatch.setattr("slipstream.launch.machine.count_gpus", lambda: 8)
    monkeypatch.setattr("slipstream.launch.machine.torch_has_cuda", lambda: True)
    monkeypatch.setattr("learner.policy.memory.gpu_bytes", lambda: 80 * 10**9)
    monkeypatch.setattr("slipstream.check.checks.CHECKS", checks.OF_THE_RUN)
    write_files(page, downloads)
    (downloads / "gsm8k.yaml").unlink(missing_ok=True)
    assert translate.main(translation(page)) == 0
    dry_run, real_run = [words for words in commands(page) if words[0] == "learner.main"]
    assert dry_run == [*real_run, "--dry-run"]
    assert run(dry_run, monkeypatch) == 0, capfd.readouterr().err[-1000:]


def test_every_framework_has_a_page_and_the_index_leads_there():
    assert [page.stem for page in PAGES] == ["prime-rl", "slime", "trl", "verl"]
    overview = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if f"](migration/{page.name})" not in overview] == []
