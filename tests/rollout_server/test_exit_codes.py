"""What the exit code of a rollout server tells the launcher: whether to start it again."""

import sys
from pathlib import Path

import pytest

from replay.lifeline import CANNOT_START
from rollout_server import main as rollout_main
from weight_bus.errors import NotAvailable, RemovedFromBus

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("error", "code"), [(NotAvailable("no UCC here"), CANNOT_START), (RemovedFromBus("failed 3 updates in a row"), 2)]
)
def test_what_is_not_installed_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: RuntimeError, code: int
) -> None:
    async def run(*_: object, **__: object) -> int:
        raise ExceptionGroup("serving", [ExceptionGroup("following", [error])])

    monkeypatch.setattr(rollout_main, "run", run)
    monkeypatch.setattr(rollout_main, "set_up_logging", lambda *_: None)
    arguments = ["--config", str(CONFIG), "--replay", "tcp://127.0.0.1:1", "--set", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["rollout_server.main", *arguments])
    assert rollout_main.main() == code
