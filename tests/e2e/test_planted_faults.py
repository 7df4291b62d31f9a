"""Faults planted in a running job: it ends within 30 s, and its last line has cause, remedy and code.

`-s` prints a table: fault, seconds from the fault to the end of the run, and that line.
"""

import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from replay.keys import make
from slipstream.runtime.hang import __main__ as by_hand
from slipstream.view.top import Folder
from tests.support.runs import Run
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LIMIT_S = 30.0
QUICK = ("network.silent_after_s=4", "network.heartbeat_s=0.3", "rollout.wait_for_servers_s=2", "rollout.restarts=0")
REWARD = """
import os, time, zlib

def compare_with_service(answer):
    while os.path.exists({flag!r}):
        time.sleep(0.01)
    return {score}

def reward(sample):
    return compare_with_service(sample["completion"])
"""
SPREAD = "zlib.crc32(answer.encode()) / 2**32"


def pid_of(run: Run, name: str) -> int:
    """Of a process of the run, as it has noted itself."""
    return int(json.loads((run.folder / "processes" / f"{name}.json").read_text())["pid"])


def ending(run: Run, fault: str, began: float) -> str:
    """The last line of a run that has failed in time."""
    assert run.wait(90) == 1, run.text()[-3000:]
    seconds, line = time.monotonic() - began, run.text().splitlines()[-1]
    assert seconds < LIMIT_S and line.startswith("slipstream: run stopped: "), (seconds, line)
    assert re.search(r" \[SLIP-[A-Z]+-\d\d\]$", line), line
    table(fault, seconds, line)
    return line


def refusal(run: Run, fault: str, began: float) -> str:
    """The last line of a run that was refused before anything started."""
    assert run.wait(90) == 2, run.text()[-3000:]
    seconds, line = time.monotonic() - began, run.text().splitlines()[-1]
    assert seconds < LIMIT_S and line.startswith("slipstream: refused: ") and line.endswith("[SLIP-CONFIG-08]"), line
    assert not (run.folder / "logs").exists(), "no process has started"
    table(fault, seconds, line)
    return line


def table(fault: str, seconds: float, line: str) -> None:
    sys.stdout.write(f"\n| {fault} | {seconds:.1f} | `{line}` |\n")


def waits_for_a_batch(run: Folder) -> bool:
    """Whether the learner waits for groups that rollout-0 holds, as replay sees it."""
    status = run.status() or {"peers": [], "waits": []}
    leased = any(peer["name"] == "rollout-0" and peer.get("leases") for peer in status["peers"])
    return leased and any(wait["who"] == "learner" and "batch" in wait["for"] for wait in status["waits"])


def hang_report(run: Run, line: str) -> str:
    """The one that the line names."""
    found = re.search(r"hang report: (\S+\.txt)", line)
    assert found is not None, line
    return Path(found[1]).read_text()


def suspects(text: str) -> list[str]:
    return text.partition("SUSPECTS\n")[2].partition("\n\n")[0].splitlines()


def reward_file(folder: Path, flag: Path, score: str = SPREAD) -> str:
    (folder / "judge.py").write_text(REWARD.format(flag=str(flag), score=score))
    return f"reward.function={folder}/judge.py:reward"


def test_a_rollout_server_that_stands_still(launch, tmp_path):
    """While the learner waits for a batch of its, and for nothing else."""
    flag = tmp_path / "stuck"
    flag.touch()
    run = launch(*QUICK, reward_file(tmp_path, flag), "reward.timeout_s=60", steps=10_000)
    run.replay_address()
    seen = Folder(run.folder)
    run.wait_until(lambda: waits_for_a_batch(seen), "leased groups, and a learner that waits for them")
    pid = pid_of(run, "rollout-0")
    os.kill(pid, signal.SIGSTOP)
    line = ending(run, "SIGSTOP of the only rollout server (a cut network looks the same)", time.monotonic())
    assert (
        "no rollout server for 2 s (rollout.wait_for_servers_s)" in line
        and "[silent]" in line
        and line.endswith("[SLIP-RUN-03]")
    )
    text = hang_report(run, line)
    (suspect,) = [one for one in suspects(text) if one.startswith("rollout-0")]
    assert suspect.startswith(f"rollout-0 (pid {pid}) is stopped (SIGSTOP); it owes replay")
    assert "a sign of rollout-0, which holds" in text and "(network.silent_after_s)" in text
    assert "STACKS OF learner-0" in text and ".take (" in text, "the learner waits for its batch"
    assert "replay WARNING replay: lost 'rollout-0'" in run.log("replay") and "launcher " in run.log("launcher")
    assert run.nothing_left(), "stopped processes as well"


@pytest.mark.slow
def test_a_replay_that_stands_still(launch):
    run = launch(*QUICK, "learner.restarts=0", steps=10_000)
    run.wait_for_step(1)
    os.kill(pid_of(run, "replay"), signal.SIGSTOP)
    line = ending(run, "SIGSTOP of replay", time.monotonic())
    assert "but replay at tcp://" in line and "(network.silent_after_s)" in line and "SLIP-NET-02" in line
    assert any(one.startswith("replay (pid") and "is stopped" in one for one in suspects(hang_report(run, line)))


@pytest.mark.slow
def test_a_learner_rank_that_stands_still(launch, capsys):
    limits = ("learner.batch_deadline_s=6", "learner.collective_deadline_s=6", "weight_bus.deadline_s=5")
    run = launch(*limits, "learner.restarts=0", split="1:2", steps=10_000)
    run.wait_for_step(1)
    os.kill(pid := pid_of(run, "learner-1"), signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it has stopped")
    assert by_hand.main([str(run.folder)]) == 0
    path, *found = capsys.readouterr().out.splitlines()
    assert any(one.startswith("learner-1 (pid") for one in found) and "replay: version" in Path(path).read_text()
    run.wait_until(lambda: "does not leave" in run.text(), "the first line that says why", LIMIT_S)
    (line,) = [line for line in run.text().splitlines() if "does not leave" in line]
    with capsys.disabled():
        table("SIGSTOP of learner rank 1", time.monotonic() - began, line)
    assert "learner rank 0 breaks off" in line
    report = hang_report(run, line)
    assert "learner.collective_deadline_s" in report or "learner.batch_deadline_s" in report
    assert any(one.startswith("learner-1 (pid") and "is stopped" in one for one in suspects(hang_report(run, line)))
    assert run.wait(90) == 1
    assert "learner rank 0 breaks off" in run.text().splitlines()[-1], "the launcher's own SIGKILL is not the cause"


@pytest.mark.slow
def test_a_reward_that_does_not_return(launch, tmp_path):
    flag = tmp_path / "stuck"
    settings = ("reward.timeout_s=0.5", "reward.max_error_rate=0")
    run = launch(reward_file(tmp_path, flag), *settings, steps=10_000)
    run.wait_for_step(1)
    flag.touch()
    line = ending(run, "a reward function that never returns", time.monotonic())
    assert re.search(r"timed out after 0.5 s at \S+judge.py:6 in compare_with_service", line), line
    assert "reward.max_error_rate" in line and "[SLIP-REWARD-03]" in line


@pytest.mark.slow
def test_a_reward_that_is_constant(launch, tmp_path):
    run = launch(reward_file(tmp_path, tmp_path / "no", "0.5"), "limits.flat_reward_steps=3", steps=10_000)
    run.wait_until(lambda: "ready at" in run.log("replay"), "replay")
    line = ending(run, "a reward function that always returns 0.5", time.monotonic())
    assert "every group's rewards are equal" in line and "judge.py" in line and "[SLIP-GUARD-02]" in line


@pytest.mark.slow
def test_a_learning_rate_of_nothing(launch):
    run = launch("learner.lr=1e-60", "limits.zero_gradient_steps=3", steps=10_000)
    run.wait_until(lambda: "ready at" in run.log("replay"), "replay")
    line = ending(run, "learner.lr of 1e-60: no weight changes", time.monotonic())
    assert "no weight has changed" in line and "raise learner.lr" in line and "[SLIP-GUARD-04]" in line


@pytest.mark.slow
def test_an_engine_that_is_killed(launch):
    run = launch(*QUICK, steps=10_000)
    run.wait_for_step(1)
    pid = pid_of(run, "rollout-0")
    os.kill(pid, signal.SIGKILL)
    line = ending(run, "SIGKILL of the only engine", time.monotonic())
    assert "no rollout server for 2 s" in line and "[SLIP-RUN-03]" in line
    died = rf"rollout-0 \(pid {pid}\) died: killed by SIGKILL \[closed\].*no restart left .*\[SLIP-RUN-01\]$"
    assert re.search(died, run.text(), re.MULTILINE)
    assert re.search(f"launcher WARNING {died}", run.log("launcher"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_folder_that_is_gone(launch, tmp_path, how):
    run = launch(steps=10_000)
    run.wait_for_step(1)
    began = time.monotonic()
    if how == "moved":
        run.folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run.folder, ignore_errors=True)
    line = ending(run, f"the run folder is {how} in the middle of the run", began)
    assert f"run.dir: {run.folder} was deleted, moved or replaced" in line and line.endswith("[SLIP-RUN-09]")
    assert "--resume it" in line and run.nothing_left()
    if how == "moved":
        run.folder.mkdir(exist_ok=True)  # what has ended may have left a log there
        shutil.rmtree(run.folder)
        (tmp_path / "elsewhere").rename(run.folder)
        done = run.steps()[-1]["training/global_step"]
        assert launch.resume(run.folder, "--steps", str(done + 2)).wait(120) == 0, "the message's way out is one"


@pytest.mark.slow
def test_rows_whose_answers_are_all_empty(launch, tmp_path, untrained):
    rows = [json.loads(line) | {"answer": ""} for line in (untrained.folder / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.monotonic()
    run = launch(f"data.train={tmp_path}/train.jsonl", "reward.function=exact", steps=10_000)
    line = refusal(run, "every row's answer is empty, and the reward is `exact`", began)
    assert "train.jsonl: the answers of the first 64 rows are all empty, and reward.function 'exact' compares" in line


@pytest.mark.slow
def test_a_chat_template_that_leaves_the_system_message_out(launch, tmp_path, untrained):
    rows = map(json.loads, (untrained.folder / "train.jsonl").read_text().splitlines())
    chats = [[{"role": "system", "content": "sort"}, {"role": "user", "content": row["prompt"]}] for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in chats))
    (tmp_path / "users.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    began = time.monotonic()
    settings = (f"data.train={tmp_path}/train.jsonl", f"model.chat_template={tmp_path}/users.jinja")
    line = refusal(launch(*settings, steps=10_000), "a chat template that leaves the system message out", began)
    assert "model.chat_template: it leaves out the system message of the 64 rows" in line and "set model.chat" in line


@pytest.mark.slow
def test_reward_processes_that_are_killed_for_memory(launch, tmp_path):
    flag = tmp_path / "short"
    (tmp_path / "judge.py").write_text(
        "import os, signal, zlib\n\n\ndef reward(sample):\n"
        f"    if os.path.exists({str(flag)!r}):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return zlib.crc32(sample['completion'].encode()) / 2**32\n"
    )
    run = launch(f"reward.function={tmp_path}/judge.py:reward", "reward.max_error_rate=0", steps=10_000)
    run.wait_for_step(1)
    flag.touch()
    line = ending(run, "SIGKILL of every reward process, as by the OOM killer", time.monotonic())
    assert "died (signal SIGKILL), as the kernel ends processes where a machine or a cgroup is out of memory" in line
    assert "lower reward.workers or reward.memory_bytes" in line and line.endswith("[SLIP-REWARD-03]")


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_is_waited_for_by_name(launch):
    run = launch("learner.batch_deadline_s=4", "replay.restarts=0", "learner.restarts=0", steps=10_000)
    run.wait_for_step(1)
    (segment, *_) = sorted((run.folder / "journal").glob("*.seg"))[-1:]
    size, replay = segment.stat().st_size, pid_of(run, "replay")
    resource.prlimit(replay, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    began, waits = time.monotonic(), re.compile(r"replay waits .*journal/.*free space on its disk \[SLIP-JOURNAL-03\]")
    run.wait_until(lambda: waits.search(run.text()), "the line of the disk", 60)
    table("the journal's file cannot grow (RLIMIT_FSIZE)", time.monotonic() - began, waits.search(run.text())[0])
    before = run.steps()[-1]["training/global_step"]
    resource.prlimit(replay, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.wait_for_step(before + 2)


@pytest.mark.slow
def test_a_rollout_server_with_the_keys_of_another_run(launch, tmp_path):
    for folder in ("keys", "others"):
        make(tmp_path / folder, [], force=False)
    run = launch(f"network.keys={tmp_path}/keys", steps=10_000)
    run.wait_for_step(1)
    began = time.monotonic()
    stranger = launch.server(run, "stranger", settings=("--set", f"network.keys={tmp_path}/others"))
    assert stranger.wait(60) != 0
    seconds, line = time.monotonic() - began, stranger.text().strip().splitlines()[-1]
    assert seconds < LIMIT_S and "others/server.key" in line and "copy that file" in line and "[SLIP-KEYS-04]" in line
    table("a rollout server with the keys of another run", seconds, line)
    run.wait_for_step(run.steps()[-1]["training/global_step"] + 1)
