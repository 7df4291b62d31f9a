"""Trackers besides metrics.jsonl: TensorBoard's event files, and what is said when a tracker is not installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def test_tensorboard_gets_every_step(launch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = launch("tracking.tensorboard=true", "evaluation.every_steps=3", steps=3)
    assert run.wait() == 0, run.text()[-3000:]
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    rewards = {event.step: event.value for event in events.Scalars("critic/rewards/mean")}
    assert rewards == pytest.approx({row["step"]: row["critic/rewards/mean"] for row in run.steps()})
    assert set(rewards) == {1, 2, 3}
    assert any(tag.startswith("val-core/") for tag in tags) and "training/lag_histogram/0" in tags
    greedy = next(tag for tag in tags if tag.startswith("val-core/") and tag.endswith("greedy"))
    assert {event.step for event in events.Scalars(greedy)} == {0, 3}


@pytest.mark.parametrize(("package", "setting"), [("wandb", "offline"), ("wandb", "online"), ("tensorboard", "true")])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(sort6, tmp_path, package, setting):
    """The package is hidden where it is installed, so that this says the same on every machine."""
    hide = (
        "import importlib.machinery, sys\n"
        "class Hidden(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        return None if name == {package!r} else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Hidden if f is importlib.machinery.PathFinder else f for f in sys.meta_path]\n"
        "from learner.main import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", hide, "--dry-run"]
    for key in [*sort6.settings, f"run.dir={tmp_path}", f"tracking.{package}={setting}"]:
        command += ["--set", key]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 2 and "Traceback" not in said, said
    expected = f"tracking.{package}: {setting}, and {package} is not installed"
    assert expected in said and f"pip install 'slipstream-rl[{package}]'" in said, said


def test_wandb_offline_needs_no_account(launch):
    """Where the extra is installed, a whole run is logged; where it is not, the run is refused before it starts."""
    run = launch("tracking.wandb=offline", steps=2)
    if importlib.util.find_spec("wandb") is None:
        assert run.wait(60) == 2
        assert "wandb is not installed; install the extra: pip install 'slipstream-rl[wandb]'" in run.text()
        assert not run.folder.exists()
    else:
        assert run.wait() == 0, run.text()[-3000:]
        assert list((run.folder / "wandb").glob("offline-run-*/*.wandb"))
