"""From nothing to a run of one's own reward: clone, quick start, look, change the reward, resume."""

import json
import re
import urllib.request
from pathlib import Path

from scripts.journeys.narration import Journey, steps

ROOT = Path(__file__).parents[2]
REWARD = '''"""The right answer counts 1, and each digit in its place a little."""


def reward(sample):
    given, wanted = sample["completion"].strip(), sample["ground_truth"]
    in_place = sum(a == b for a, b in zip(given, wanted)) / len(wanted)
    return {"score": float(given == wanted) + 0.1 * in_place, "in_place": in_place}
'''
MORE_STEPS = 100


def travel(journey: Journey, *, installed: bool) -> None:
    """All of it. Raises Failed."""
    journey.say("Clone and start")
    clone = journey.folder / "slipstream"
    journey.run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone))
    if not installed:
        journey.python = ""  # quickstart.sh makes .venv
    quickstart = journey.start("bash", "scripts/quickstart.sh", cwd=clone)
    run = clone / "runs" / "quickstart"
    journey.wait(lambda: steps(run) >= 1, "the first step", 900, quickstart)
    journey.facts["first_step_s"] = round(quickstart.seconds, 1)
    journey.python = journey.python or str(clone / ".venv" / "bin" / "python")

    journey.say("Look while it trains, from another terminal")
    journey.wait(lambda: steps(run) >= 10, "step 10", 300, quickstart)
    journey.run("slipstream", "top", "runs/quickstart", "--once", cwd=clone, tell=[r"step +\d+/80", r"wait"])
    look_at_dashboard(journey, clone)
    said = quickstart.end([r"finished 80 steps", r'^\{"greedy_before"'])
    summary = json.loads(next(line for line in said.splitlines() if line.startswith('{"greedy_before"')))
    journey.facts |= {key: summary[key] for key in ("greedy_before", "greedy_after", "train_seconds")}

    journey.say("Examine the machine")
    config = ("--config", "runs/quickstart/config.yaml")
    journey.run("slipstream", "doctor", *config, cwd=clone, tell=[r"a run can start"])

    journey.say("A reward of one's own: write it, try it, check it, train with it")
    journey.write(clone / "my_reward.py", REWARD)
    mine = ("--set", "reward.function=my_reward.py:reward")
    eval_file = str(next(clone.glob("data/sort6-*/eval.jsonl")).relative_to(clone))
    tried = ("slipstream", "try-reward", eval_file, *config, "--rows", "5", *mine)
    journey.run(*tried, cwd=clone, tell=[r"5 answers, 0 errors; score mean 1.1"])
    journey.run(
        "slipstream", "train", "--resume", "runs/quickstart", "--steps", str(MORE_STEPS), *mine,
        cwd=clone, tell=[r"changed: reward.function", rf"finished {MORE_STEPS} steps"],
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = max((row for row in rows if "step" in row), key=lambda row: row["step"])
    journey.facts |= {"trained_steps": last["step"], "reward_of_my_own": round(last["critic/rewards/mean"], 3)}


def look_at_dashboard(journey: Journey, clone: Path) -> None:
    """Start it, open its page and what the page asks for, and end it with Ctrl-C."""
    dashboard = journey.start("slipstream", "dashboard", "runs/quickstart", cwd=clone)
    url = journey.wait(lambda: re.search(r"http://\S+", dashboard.text()), "the dashboard's URL", 60, dashboard)[0]
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(url, timeout=30) as page:
        html = page.read().decode()
    dashboard.interrupt()
    dashboard.end([r"dashboard at http://127.0.0.1"], codes=(0, 130))
    title = re.search(r"<title>([^<]*)", html)
    journey.note(f"its page answers: {title[1] if title else html[:60]!r}")
