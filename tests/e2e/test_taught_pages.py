"""docs/howto/distillation.md and sft.md as a reader follows them, two steps a run; stand-ins for what is downloaded."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Runs, environment
from tests.test_docs import FENCE, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SHORT = ["learner.total_steps=2", "checkpoint.every_steps=2", "evaluation.every_steps=2", "evaluation.num_prompts=4"]
SHORT += ["rollout.groups_per_step=4", "learner.schedule=constant", "tracking.plot=false"]
DOWNLOADED = {"scripts/quickstart.sh"}


def commands(page: str) -> list[list[str]]:
    """Module or script of each command, and its arguments."""
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    blocks = [block for language, block in FENCE.findall(text) if language == "bash"]
    return [started(shlex.split(line)) for block in blocks for line in block.splitlines()]


def stand_in(folder: Path, made: Path) -> None:
    """What `scripts/quickstart.sh --real` leaves behind, with the tiny model and its digits."""
    model = folder / "models" / "SmolLM2-135M-Instruct"
    shutil.copytree(made / "model", model)
    described = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(described))
    (folder / "data" / "chain_sum").mkdir(parents=True)
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(made / name, folder / "data" / "chain_sum")
    step = folder / "runs" / "smollm2-cpu" / "checkpoints" / "step_24"
    shutil.copytree(model, step / "hf")
    (step / "state.json").write_text("{}")
    sizes = {str(path.relative_to(step)): path.stat().st_size for path in step.rglob("*") if path.is_file()}
    (step / "COMPLETE").write_text(json.dumps({"files": sizes}))


@pytest.mark.parametrize(("page", "trained"), [("distillation.md", 3), ("sft.md", 2)])
def test_every_command_of_a_page_runs(
    page: str, trained: int, launch: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if page == "distillation.md":
        stand_in(tmp_path, launch.input.folder)
    runs = []
    for words in commands(page):
        if words[0] in DOWNLOADED:
            continue
        if words[0] != "learner.main":
            subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True, timeout=200, env=environment())
            continue
        name = words[words.index("--name") + 1] if "--name" in words else Path(words[2]).stem
        settings = [word for one in SHORT for word in ("--set", one)]
        run = launch.start([*words, *settings], tmp_path / "runs" / name, cwd=tmp_path)
        assert run.wait() == 0, run.text()[-3000:]
        runs.append(run)
    assert len(runs) == trained and all(len(run.steps()) == 2 for run in runs)
    wanted = ["distill/kl"] * 3 if page == "distillation.md" else ["sft/loss", "critic/score/mean"]
    assert all(metric in run.steps()[-1] for run, metric in zip(runs, wanted, strict=True))
