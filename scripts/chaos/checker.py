"""What became of every group of a run, told by its journal, its ledger and its producers' logs alone.

`python -m scripts.chaos.checker runs/<name>` prints one line of JSON. Nothing of replay, the learner or the weight bus
is imported: a mistake there cannot hide itself here. Each rule below has a test with a journal that breaks it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.chaos.journal import Damage, read
from scripts.chaos.story import GroupId, Rules, Story


@dataclass(slots=True)
class Report:
    """What was found. A run is in order when `lost`, `trained_twice` and `violations` are empty."""

    acked: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    buffered: int = 0
    leased_again: int = 0
    """Acked groups that were stale, and whose prompts wait for their second answer."""
    repeated_steps: int = 0
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.trained_twice or self.violations)

    def as_json(self) -> dict[str, Any]:
        """Counts, and the first few of what is wrong."""
        return {
            "acked": self.acked,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "buffered": self.buffered,
            "leased_again": self.leased_again,
            "repeated_steps": self.repeated_steps,
            "lost": len(self.lost),
            "trained_twice": len(self.trained_twice),
            "violations": len(self.violations),
            "wrong": [*self.lost, *self.trained_twice, *self.violations][:20],
        }


def check(run: Path, *, journal: Path | None = None, acks: Iterable[Path] | None = None) -> Report:
    """Check a run folder.

    Args:
        run: runs/<name> with config.yaml, journal/ and ledger.jsonl.
        journal: a folder that has every file of the journal; default run/journal, which has them all only with
            replay.journal_keep all.
        acks: logs of producers, one JSON line for each Ack that came; default run/logs/acks-*.jsonl.
    """
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    rules = Rules(
        async_lag=config["replay"]["async_lag"],
        on_stale=config["replay"]["on_stale"],
        groups_per_step=config["rollout"]["groups_per_step"],
    )
    report = Report()
    try:
        records, _ = read(journal or run / "journal")
    except Damage as damage:
        report.violations.append(f"journal: {damage}")
        return report
    story = Story(rules)
    for record in records:
        story.tell(record)
    report.violations += story.wrong
    report.lost += story.lost
    report.repeated_steps, report.leased_again = story.repeated_steps, len(story.reopened)
    acked = list(accepted(acks if acks is not None else sorted((run / "logs").glob("acks-*.jsonl"))))
    report.acked = len({group for group, _ in acked})
    report.lost += [
        f"group {list(group)} attempt {attempt} was acked and is not in the journal"
        for group, attempt in sorted(set(acked) - story.accepted_attempts)
    ]
    _fates(story, report)
    report.violations += [*ledger_differences(run / "ledger.jsonl", story), *lag_rows(run / "metrics.jsonl", rules)]
    return report


def _fates(story: Story, report: Report) -> None:
    """Every accepted group is trained once, or dropped once, or still in the buffer, and not for too long."""
    trained = Counter(group for commit in story.line.values() for group in commit.groups)
    report.trained = len(trained)
    report.trained_twice += [f"group {list(group)} is in {n} steps" for group, n in trained.items() if n > 1]
    for group, reasons in story.dropped.items():
        report.dropped.update(reasons[:1])
        if len(reasons) > 1:
            report.violations.append(f"group {list(group)} was dropped {len(reasons)} times: {', '.join(reasons)}")
        if group in trained:
            report.violations.append(f"group {list(group)} was dropped ({reasons[0]}) and is trained")
    for group, high in story.held.items():
        if group in trained or group in story.dropped:
            continue
        report.buffered += 1
        limit = high + story.rules.async_lag + 1
        if story.version >= limit:
            report.lost.append(
                f"group {list(group)} was accepted at version {high}, must be trained by step {limit}, and is neither"
                f" trained nor dropped at version {story.version}"
            )


def accepted(logs: Iterable[Path]) -> Iterable[tuple[GroupId, int]]:
    """(group, attempt) of every Ack that told a producer that its group is kept."""
    for path in logs:
        for line in _whole_lines(path):
            event = json.loads(line)
            if event.get("event") == "ack" and event["status"] == "accepted":
                yield (event["group"][0], event["group"][1]), event["attempt"]


def ledger_differences(path: Path, story: Story) -> Iterable[str]:
    """Where ledger.jsonl, which the learner writes, says something else than the journal, which replay writes."""
    last: dict[int, int] = {}
    for line in _whole_lines(path):
        entry = json.loads(line)
        step, incarnation = entry["step"], entry["incarnation"]
        commit = story.commits.get((step, incarnation))
        if commit is None:
            continue  # both have died, and the commit was still on its way: the next incarnation does the step again
        last[step] = incarnation
        if [tuple(group) for group in entry["groups"]] != list(commit.groups):
            yield f"ledger: step {step} of incarnation {incarnation} has other groups than the journal's take"
        if entry["digest"] != commit.digest:
            yield f"ledger: step {step} of incarnation {incarnation} has another digest than the journal's commit"
    for step, commit in story.line.items():
        if last.get(step) != commit.incarnation:
            yield f"ledger: step {step} of incarnation {commit.incarnation} is missing"


def lag_rows(path: Path, rules: Rules) -> Iterable[str]:
    """Steps in whose metrics a trained token is above the bound: the learner's own count, after masking."""
    for line in _whole_lines(path):
        row = json.loads(line)
        above = [lag for lag in row.get("training/lag_histogram", {}) if int(lag) > rules.async_lag]
        if above:
            yield f"metrics: step {row['training/global_step']} trained tokens of lag {', '.join(above)}"


def _whole_lines(path: Path) -> Sequence[str]:
    """Lines of a file that end with a newline; a process that is killed may leave a torn one."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos.checker", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/quickstart")
    parser.add_argument("--journal", type=Path, default=None, help="folder with every file of its journal")
    args = parser.parse_args(argv)
    report = check(args.run, journal=args.journal)
    print(json.dumps(report.as_json()))
    return 0 if report.in_order else 1


if __name__ == "__main__":
    sys.exit(main())
