"""The command `slipstream`: its table, help, names."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream import command
from slipstream.command import COMMANDS
from slipstream.runtime.program import program
from tests.test_docs import help_of

ROOT = Path(__file__).parents[2]
WANTED = {"train", "playback", "launch", "start-replay", "start-rollout", "doctor", "top", "fit", "try-reward", "keys"}
LIGHT = (
    "learner.main",
    "slipstream.launch",
    "slipstream.launch.doctor",
    "slipstream.view.top",
    "learner.record.summary",
    "replay.keys",
    "slipstream.command.errors",
    "slipstream.translate",
    "slipstream.runtime.hang",
)
"""Of the modules, those whose parser is built without torch."""


def test_the_console_script_is_the_table():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"slipstream": "slipstream.command:main"}
    assert set(COMMANDS) >= WANTED and all(COMMANDS[name].does for name in WANTED)


def test_the_help_fits_a_screen_with_every_command(capsys):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [name for name in COMMANDS if not any(name in line for line in lines)] == []


def test_a_command_imports_its_module_alone():
    script = (
        "import sys; from slipstream.command import main; code = main(['lag', '--help']) "
        "if False else main(['--help']); found = {'learner', 'replay', 'rollout_server', 'torch'} & set(sys.modules);"
        "import slipstream.command as c; c.importlib.import_module = lambda name: sys.exit(name); "
        "assert 'torch' not in sys.modules and 'learner.main' not in sys.modules, found; main(['start-rollout'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "rollout_server.main", done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [("trian", "did you mean 'train'?"), ("dotcor", "did you mean 'doctor'?"), ("xyz", "there are train, playback,")],
)
def test_an_unknown_name_suggests_the_nearest(capsys, name, words):
    assert command.main([name]) == 2
    assert words in capsys.readouterr().err


def test_the_first_arguments_of_a_name_come_before_the_users(monkeypatch):
    seen = []
    monkeypatch.setattr("learner.main.main", lambda: seen.append(list(sys.argv)) or 0)
    monkeypatch.setattr(sys, "argv", ["slipstream"])
    assert command.main(["playback", "runs/x", "--steps", "3"]) == 0
    assert command.main(["playback", "--help"]) == 0
    assert seen == [["slipstream playback", "--replay", "runs/x", "--steps", "3"], ["slipstream playback", "--help"]]


@pytest.mark.parametrize("module", LIGHT)
def test_usage_names_how_it_was_started(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module])
    assert program(module) == f"python -m {module}"
    assert help_of(module).startswith(f"usage: python -m {module}")
    for name in [name for name, each in COMMANDS.items() if each.module == module]:
        monkeypatch.setattr(sys, "argv", [f"slipstream {name}"])
        assert program(module) == f"slipstream {name}"


def test_every_parser_asks_how_it_was_started():
    asking = []
    for module in {each.module for each in COMMANDS.values()}:
        spec = importlib.util.find_spec(command.entry_module(module))
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        asking += [] if re.search(rf"prog=program\(\"{re.escape(module)}\"\)", text) else [module]
    assert asking == []
