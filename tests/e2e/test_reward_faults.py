"""A whole run whose reward function misbehaves in every way once: the run goes on, and the metrics say so.

Its cheap witness in the default suite is tests/rollout_server/test_reward_limits.py.
"""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

REWARD = """
import os, pathlib, signal, time

DONE = pathlib.Path({folder!r})

def hang(): time.sleep(600)
def die(): os.kill(os.getpid(), signal.SIGSEGV)
def leave(): os._exit(0)
def throw(): raise ValueError("of the grader")
def nan(): return float("nan")
def none(): return None
def fork():
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    os._exit(3)
def flood():
    while True: print("x" * 200)
def eat(): return bytearray(10**12)

def reward(sample):
    with (DONE / "calls").open("ab") as calls:
        calls.write(b".")
    number = (DONE / "calls").stat().st_size
    for place, fault in enumerate((hang, die, leave, throw, nan, none, fork, flood, eat), start=1):
        for time_ in ("once", "again"):  # what kills a request of several answers is judged alone then
            if number < {every} * place:
                break
            try:
                (DONE / f"{{fault.__name__}}_{{time_}}").mkdir()
            except FileExistsError:
                continue
            return fault()
    return {{"score": (len(sample["completion"]) + sample["completion"].count("1")) % 7, "counted": 1.0}}
"""
FAULTS = {"hang", "die", "leave", "throw", "nan", "none", "fork", "flood", "eat"}


def faults_of(done):
    return {path.name.partition("_")[0] for path in done.iterdir() if path.is_dir()}


def test_a_run_survives_a_reward_that_does_everything_wrong_once(launch, tmp_path):
    done = tmp_path / "done"
    done.mkdir()
    (tmp_path / "faulty.py").write_text(REWARD.format(folder=str(done), every=40))
    run = launch(
        f"reward.function={{{tmp_path}/faulty.py:reward: 1, length: {{weight: 0.1, max_tokens: 4}}}}",
        "reward.timeout_s=1",
        "reward.max_error_rate=0.9",
        "learner.total_steps=6",
    )
    assert run.wait(240) == 0, run.text()[-3000:]
    steps = run.steps()
    assert len(steps) == 6 and faults_of(done) == FAULTS
    last = steps[-1]
    assert max(row["reward/error_rate"] for row in steps) > 0
    assert last["reward/faulty.reward/counted"] == 1.0 and last["reward/length"] <= 0.0 and "reward/seconds" in last
    said = run.log("replay") + run.log("rollout-0")
    for words in ("timed out after 1 s", "SIGSEGV", "exit code 0", "ValueError: of the grader", "returned nan"):
        assert words in said, words
    assert run.nothing_left()
