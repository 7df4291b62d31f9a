"""SGLang that does not start: the error names the cause that stands in its children's log."""

import json
import os
import shutil
from pathlib import Path

import pytest
from sglang_served import Served

from rollout_server.engines.base import EngineStartFailed
from rollout_server.engines.sglang.process import ChildrenLog, start_failure

DIED = (
    "Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9 (SIGKILL), a common cause is the"
    " OS OOM killer. Run `dmesg -T | grep -i oom` to check."
)
TRACEBACK = """Traceback (most recent call last):
  File "scheduler.py", line 1, in run
ImportError: the attention kernel is missing

[2026-01-01 00:00:00] Received sigquit
"""


def test_the_last_error_is_that_of_this_start(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as file:
        file.write(b"ValueError: of an earlier start\n")
        file.flush()
        log = ChildrenLog(file.fileno())
        assert log.last_error() == ""
        file.write(TRACEBACK.encode())
        file.flush()
        assert log.last_error() == "ImportError: the attention kernel is missing"


def test_a_stderr_that_is_no_file_has_no_last_error() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, TRACEBACK.encode())
        assert ChildrenLog(writer).last_error() == ""
    finally:
        os.close(reader)
        os.close(writer)


def test_the_oom_killer_is_named_for_a_child_that_was_killed_only() -> None:
    error = "ImportError: the attention kernel is missing"
    assert start_failure(DIED.format(1), error).startswith(f"{error} (Rank 0 scheduler died")
    assert "OOM" not in start_failure(DIED.format(1), error) + start_failure(DIED.format(1), "")
    assert "OOM" in start_failure(DIED.format(-9), "")


@pytest.mark.slow  # two starts of SGLang; what the message is made of has the tests above
async def test_a_scheduler_that_cannot_load_its_model_is_named_by_its_error(served: Served, tmp_path: Path) -> None:
    from rollout_server.engines.sglang.engine import SGLangEngine

    shutil.copytree(served.folder, tmp_path, dirs_exist_ok=True)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "vocab_size": described["vocab_size"] + 1}))
    with pytest.raises(EngineStartFailed) as failed:
        SGLangEngine(served.config(f"model.path={tmp_path}"))
    text = str(failed.value)
    assert "did not start: " in text and "OOM" not in text, text
    assert text.partition("did not start: ")[2].split()[0].rstrip(":").endswith("Error"), text
