"""A whole run makes no code from data: every process of it is watched, with a checkpoint and a resume."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forking import Zygote
from tests.support.runs import Runs, untrained_input

HERE = Path(__file__).parent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SMALL = (
    "placement.split=1:1",
    "evaluation.sampled=false",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "evaluation.num_prompts=4",
    "checkpoint.every_steps=2",
    "reward.function=scripts.bench.core:spread",
)
PROCESSES = ("launcher", "learner-0", "replay", "rollout-0")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """The folder that the hook of every process started from here on reports to."""
    folder = tmp_path / "audit"
    folder.mkdir()
    monkeypatch.setenv("SLIPSTREAM_AUDIT", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
    return folder


@pytest.fixture
def launch(tmp_path, tmp_path_factory, reports):
    """Whole runs without training of the input, of programs that are forked with the hook in place."""
    zygote = Zygote()
    runs = Runs(tmp_path, untrained_input(tmp_path_factory.mktemp("untrained") / "data"), zygote)
    yield runs
    runs.close()
    zygote.close()


def read(folder, kind):
    files = sorted(folder.glob(f"{kind}-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def watched(folder, run):
    """Names of the run's processes in which the hook is in place."""
    noted = {path.stem: json.loads(path.read_text())["pid"] for path in (run.folder / "processes").glob("*.json")}
    return {name for name, pid in noted.items() if (folder / f"live-{pid}").exists()}


def test_a_run_with_a_checkpoint_and_a_resume_makes_no_code_from_data(reports, launch):
    run = launch(*SMALL, steps=2)
    code = run.wait(140)
    assert read(reports, "caught") == []
    assert code == 0, run.text()[-3000:]
    assert watched(reports, run) == set(PROCESSES)
    again = launch(*SMALL, steps=3, arguments=("--resume", str(run.folder)))
    code = again.wait(140)
    assert read(reports, "caught") == []
    assert code == 0, again.text()[-3000:]
    assert [row["training/global_step"] for row in again.steps()] == [1, 2, 3]
    assert watched(reports, again) == set(PROCESSES)
    assert any("rollout_server.rewards.worker" in record["command"] for record in read(reports, "live"))
    # the resume read a checkpoint, whose metadata is a pickle of ours: the hook sees such things
    allowed = {(record["event"], record["where"]) for record in read(reports, "allowed")}
    assert ("pickle.find_class", "/torch/distributed/checkpoint/") in allowed


@pytest.mark.parametrize(
    ("body", "caught"),
    [
        ("import pickle; return pickle.loads(b'cbuiltins\\nlen\\n.')", "pickle.find_class"),
        ("return eval(text)", "compile"),
        ("exec(text)", "compile"),
        ("import marshal; return marshal.loads(marshal.dumps(text))", "marshal.loads"),
        ("import os; os.system('true')", "os.system"),
        ("import ast; return ast.literal_eval(text)", "compile"),
        ("import collections; return collections.namedtuple('T', 'a')", "compile"),
        ("import wave; return text", None),
        ("import json; return json.loads(text)", None),
        ("import msgpack; return msgpack.unpackb(msgpack.packb(text))", None),
    ],
)
def test_the_hook_knows_code_from_data(reports, body, caught):
    """A function whose file is one of ours, in a process of its own."""
    file = HERE.parents[2] / "replay" / "channel" / "no_such_file.py"
    source = f"def handle(text):\n    {body}\n"
    program = f"scope = {{}}\nexec(compile({source!r}, {str(file)!r}, 'exec'), scope)\nscope['handle']('1')\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, check=False, timeout=60, capture_output=True)
    assert done.returncode == (0 if caught is None else -signal.SIGKILL), done.stderr
    assert [report["event"] for report in read(reports, "caught")] == ([] if caught is None else [caught])
