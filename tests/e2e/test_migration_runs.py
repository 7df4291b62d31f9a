"""What docs/migration/*.md translate trains: three steps of each on a CPU, with a tiny model on tiny rows.

`-s` prints a table: page, seconds, mean reward and gradient norm of each step.
"""

import sys
import time
from pathlib import Path

import pytest

from slipstream.translate import __main__ as translate
from tests.support import tiny_gsm8k
from tests.support.runs import Runs
from tests.test_migration_pages import PAGES, translation, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = {"run.dir": "runs", "model.path": "model", "data.train": "train.jsonl", "placement.split": "1:1"}
"""What of the pages' runs is of another machine. All sizes stay: 256 to 2,048 answers a step."""
STEPS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    tiny_gsm8k.make(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_translated_run_trains(page, tiny, monkeypatch, capsys):
    pytest.importorskip("math_verify", reason="needs the package math-verify (extra math)")
    monkeypatch.chdir(tiny)
    monkeypatch.setenv("WANDB_MODE", "offline")  # where it is installed
    write_files(page, tiny)
    settings = [word for key, value in HERE.items() for word in ("--set", f"{key}={value}")]
    if page.stem != "trl":
        settings += ["--set", "data.eval=test.jsonl"]
    out = f"{page.stem}.yaml"
    assert translate.main([*translation(page), *settings, "--out", out]) == 0, capsys.readouterr().err
    runs = Runs(tiny, None, None)  # type: ignore[arg-type] - the page's file names its input
    began = time.monotonic()
    words = ["learner.main", "--config", out, "--name", page.stem, "--steps", str(STEPS)]
    run = runs.start(words, tiny / "runs" / page.stem, cwd=tiny)
    try:
        assert run.wait(500) == 0, run.text()[-3000:]
    finally:
        runs.close()
    rows = run.steps()
    figures = " | ".join(f"{row['critic/rewards/mean']:.3f}, {row['actor/grad_norm']:.3f}" for row in rows)
    sys.stdout.write(f"\n| {page.stem} | {time.monotonic() - began:.0f} | {figures} |\n")
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    assert all(row["actor/grad_norm"] > 0 and 0 < row["critic/rewards/mean"] < 1 for row in rows)
    assert all(row["weight_sync/digests_equal"] for row in rows)
