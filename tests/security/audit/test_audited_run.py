"""A whole run makes no code from data: every process of it is watched, with a checkpoint and a resume."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("whole_runs", HERE.parents[1] / "e2e" / "conftest.py")
whole_runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(whole_runs)
launch = whole_runs.launch

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
PROCESSES = ("learner.main", "learner.train", "replay.main", "rollout_server.main", "rollout_server.rewards.worker")


@pytest.fixture(scope="session")
def sort6(tmp_path_factory):
    """The quick start's input without its half minute of training: what is learned here is of no interest."""
    from learner.examples.sort6 import build_model, rows, save_tokenizer, split_prompts

    folder = tmp_path_factory.mktemp("untrained") / "data"
    folder.mkdir()
    for name, numbers in zip(("train.jsonl", "eval.jsonl"), split_prompts(0, 64, 16), strict=True):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows(numbers)))
    build_model(0).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    return whole_runs.Sort6(folder)


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """The folder that the hook of every process started from here on reports to."""
    folder = tmp_path / "audit"
    folder.mkdir()
    monkeypatch.setenv("SLIPSTREAM_AUDIT", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
    return folder


def read(folder, kind):
    files = sorted(folder.glob(f"{kind}-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def watched(folder):
    commands = [" ".join(record["command"]) for record in read(folder, "live")]
    return {name for name in PROCESSES if any(name in command for command in commands)}


def test_a_run_with_a_checkpoint_and_a_resume_makes_no_code_from_data(sort6, reports, launch):
    run = launch(*SMALL, steps=2)
    code = run.wait(140)
    assert read(reports, "caught") == []
    assert code == 0, run.text()[-3000:]
    again = launch("learner.total_steps=3", steps=3, arguments=("--resume", str(run.folder)))
    code = again.wait(140)
    assert read(reports, "caught") == []
    assert code == 0, again.text()[-3000:]
    assert [row["training/global_step"] for row in again.steps()] == [1, 2, 3]
    assert watched(reports) == set(PROCESSES)
    # the resume read a checkpoint, whose metadata is a pickle of ours: the hook sees such things
    allowed = {(record["event"], record["where"]) for record in read(reports, "allowed")}
    assert ("pickle.find_class", "/torch/distributed/checkpoint/") in allowed


def test_an_unpickling_in_a_message_handler_is_caught(sort6, reports, launch, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_AUDIT_PLANT", "replay.channel.frames:decode")
    run = launch(*SMALL, steps=2)
    run.wait_until(lambda: read(reports, "caught"), "the hook")
    run.process.terminate()
    assert run.wait(60) != 0
    caught = read(reports, "caught")[0]
    assert caught["event"] == "pickle.find_class" and "/replay/channel/frames.py:" in caught["stack"][0]


@pytest.mark.parametrize(
    ("body", "caught"),
    [
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
