"""A run folder that is deleted, moved or replaced is seen, whichever part of it goes first."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import load
from slipstream.launch import run_folder
from slipstream.launch.launcher import Launcher
from slipstream.launch.run_folder import FolderGone, RunFolder
from slipstream.view.live_view import LiveView


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    for name in ("journal", "logs"):
        (made / name).mkdir(parents=True)
    (made / "config.yaml").touch()
    return made


@pytest.mark.parametrize("part", ["", "config.yaml", "journal", "logs"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_part_that_is_gone_is_named_with_a_way_out(folder: Path, part: str, is_replaced: bool) -> None:
    watched, before = RunFolder(folder), folder / part
    watched.check()
    before.rename(folder.parent / "elsewhere")
    if is_replaced and before.suffix:
        before.touch()
    elif is_replaced:
        shutil.copytree(folder.parent / "elsewhere", before)
    with pytest.raises(FolderGone, match=r"run was deleted, moved or replaced .* --resume it, or start .*RUN-09"):
        watched.check()


@pytest.mark.parametrize("is_read", [False, True])
def test_the_launcher_names_it_before_what_dies_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """Whether a look at everything goes well once more, or misses a log."""
    config = load("quickstart", [f"run.dir={folder.parent}", f"run.name={folder.name}"])
    launcher = Launcher(config, False, LiveView(config, "off"), address="tcp://127.0.0.1:9")
    launcher.learner = SimpleNamespace(is_done=False)  # type: ignore[assignment]
    looks: list[object] = []

    def look(_: Launcher, dealer: object) -> None:
        looks.append(dealer)
        shutil.rmtree(folder)
        if is_read:
            raise FileNotFoundError("logs/learner.log")

    monkeypatch.setattr(Launcher, "_watch_once", look)
    monkeypatch.setattr(run_folder, "SETTLED_S", 0.0)
    with pytest.raises(FolderGone):
        launcher.watch()
    assert len(looks) == 1


def test_what_was_never_there_is_not_missed(folder: Path) -> None:
    shutil.rmtree(folder / "journal")
    watched = RunFolder(folder)
    (folder / "journal").mkdir()
    watched.check()


def test_a_missing_file_is_the_folder_s_where_a_clean_up_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: None)
    watched, missing = RunFolder(folder), FileNotFoundError("logs/learner.log")
    with pytest.raises(FileNotFoundError, match="logs/learner"):
        watched.check_after(missing)
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: shutil.rmtree(folder))
    with pytest.raises(FolderGone):
        watched.check_after(missing)


def test_a_job_finds_the_folder_that_it_has_begun_under_a_free_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, job = load("quickstart", [f"run.dir={tmp_path}", "run.name=run"]), run_folder.new_job()
    run_folder.claim_run_dir(config, new=True)
    assert run_folder.folder_of(job, config) is None
    monkeypatch.setenv(run_folder.JOB, job)
    run_folder.claim_run_dir(config, new=True)
    assert run_folder.folder_of(job, config) == tmp_path / "run-2" and run_folder.folder_of("", config) is None
