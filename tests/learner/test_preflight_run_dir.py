"""Preflight of run.dir: whether a run folder can be made there is tried, not read from permissions."""

from pathlib import Path

import pytest

from configs import ConfigError, load
from learner.launch.preflight import check_run_dir


def test_a_run_dir_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    check_run_dir(load("quickstart", [f"run.dir={tmp_path}/not/there/yet"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/runs", "/proc"])
def test_a_file_system_that_takes_no_folder_is_refused(folder: str) -> None:
    """/proc has room for root by its permissions, and mkdir fails there."""
    with pytest.raises(ConfigError, match=rf"run\.dir: '{folder}': /proc is not writable \(.+\); name a folder"):
        check_run_dir(load("quickstart", [f"run.dir={folder}"]))


def test_a_file_is_no_run_dir(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"runs is a file; name a folder"):
        check_run_dir(load("quickstart", [f"run.dir={tmp_path}/runs"]))
