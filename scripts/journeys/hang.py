"""Two runs that stand still: a reward that never returns, and a rollout server that was stopped."""

import json
import os
import re
import signal
import time
from pathlib import Path

from scripts.journeys.narration import Background, Journey, steps

WAITS = '''import itertools
import time

requests = itertools.count()


def ask_service(prompt, answer):
    """A request without a deadline, to a service that stops answering after 3,000 of them."""
    while next(requests) > 3000:
        time.sleep(1)
    return float(answer == "".join(sorted(prompt[:6])))


def reward(sample):
    return ask_service(sample["prompt"], sample["completion"].strip())
'''
MENDED = """def reward(sample):
    return float(sample["completion"].strip() == "".join(sorted(sample["prompt"][:6])))
"""
STEPS = 20
STILL_S = 15.0
"""Without a new row, after which a run of this size counts as standing still."""
SHORT = ("network.silent_after_s=5", "rollout.wait_for_servers_s=5")


def travel(journey: Journey) -> None:
    """Both. Raises Failed."""
    a_reward_that_never_returns(journey)
    a_server_that_was_stopped(journey)


def started(journey: Journey, name: str, *settings: str, number: int = STEPS) -> tuple[Path, Background]:
    """`slipstream train` in another terminal."""
    words = [word for setting in settings for word in ("--set", setting)]
    run = journey.start("slipstream", "train", "--name", name, "--steps", str(number), *words)
    return journey.folder / "runs" / name, run


def a_reward_that_never_returns(journey: Journey) -> None:
    """Found by the stacks of a hang report, mended in its file, resumed."""
    journey.say("My run hangs: no step any more, no error")
    journey.write(journey.folder / "my_reward.py", WAITS)
    mine = "reward.function=my_reward.py:reward"
    folder, run = started(journey, "hangs", mine, "reward.timeout_s=3600")
    journey.wait(lambda: steps(folder) >= 1, "the first step", 240, run)
    journey.wait(lambda: _stands_still(folder), "the run to stand still", 120, run)
    journey.facts["hung_at_step"] = steps(folder)

    journey.say("Which process waits for which, and where does it stand?")
    journey.run("slipstream", "top", "runs/hangs", "--once", tell=[r"wait"])
    journey.run("slipstream", "hang", "runs/hangs", tell=[r"hang-asked-"])
    report = max(folder.glob("hang-asked-*.txt"))
    journey.run("grep", "-n", "my_reward.py", str(report.relative_to(journey.folder)), tell=[r"ask_service"])

    journey.say("Stop it, mend the reward, go on")
    run.interrupt()
    run.end([r"--resume"], codes=(130,), timeout_s=60)
    journey.write(journey.folder / "my_reward.py", MENDED)
    resume = ("slipstream", "train", "--resume", "runs/hangs", "--set", "reward.timeout_s=10")
    journey.run(*resume, tell=[r"changed: reward.timeout_s", rf"finished {STEPS} steps"])


def a_server_that_was_stopped(journey: Journey) -> None:
    """Named by the hang report at once, and by the error code when the deadline has passed; resumed."""
    journey.say("My run hangs again: another one, whose rollout server a debugger has stopped")
    folder, run = started(journey, "stops", *SHORT, number=200)
    journey.wait(lambda: steps(folder) >= 5, "step 5", 240, run)
    pid = int(json.loads((folder / "processes" / "rollout-0.json").read_text())["pid"])
    os.kill(pid, signal.SIGSTOP)
    journey.note(f"rollout-0, pid {pid}, is stopped now: SIGSTOP")
    journey.run("slipstream", "hang", "runs/stops", tell=[r"rollout-0 .* is stopped"])
    said = run.end([r"run stopped: .*\[SLIP-"], codes=(1,), timeout_s=90)
    code = re.findall(r"\[(SLIP-[A-Z]+-\d\d)\]", said)[-1]
    journey.facts["code"] = code
    journey.run("slipstream", "explain", code, tell=[r"^Cause", r"^Mend"])

    journey.say("What was stopped has ended with the run: go on")
    done = steps(folder)
    journey.run(
        "slipstream",
        "train",
        "--resume",
        "runs/stops",
        "--steps",
        str(done + 10),
        tell=[rf"finished {done + 10} steps"],
    )


def _stands_still(folder: Path) -> bool:
    """Whether the run has written no row for STILL_S."""
    file = folder / "metrics.jsonl"
    newest = max(path.stat().st_mtime for path in (file, folder / "config.yaml") if path.exists())
    return time.time() - newest > STILL_S
