"""What became of every group of a run: `python -m scripts.chaos.checker runs/<name>` prints one line of JSON.

The rules are checked on its journal, its ledger and its producers' records alone. Nothing of replay, the learner or the
weight bus is imported: a mistake there cannot hide itself here. Each rule has a test with a journal that breaks it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.chaos.checker.history import History, identity
from scripts.chaos.checker.journal import Damage, read
from scripts.chaos.polling import JsonLines


@dataclass
class Report:
    """What was found. A run is in order when `lost`, `trained_twice` and `violations` are empty."""

    acked: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    buffered: int = 0
    leased_again: int = 0  # acked groups that were stale, and whose prompts wait for their second answer
    repeated_steps: int = 0
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        return not (self.lost or self.trained_twice or self.violations)

    def as_json(self) -> dict[str, Any]:
        lists = ("lost", "trained_twice", "violations")
        counts = {key: len(value) if key in lists else value for key, value in vars(self).items()}
        return {**counts, "wrong": [*self.lost, *self.trained_twice, *self.violations][:20]}


def check(run: Path, *, journal: Path | None = None, acks: Iterable[Path] | None = None) -> Report:
    """Check a run folder, which has config.yaml, journal/ and ledger.jsonl.

    `journal` has every file of the journal; default run/journal, which has them all only with replay.journal_keep all.
    `acks` are records of producers, a JSON line for each Ack; default run/logs/acks-*.jsonl.
    """
    return examine(run, journal=journal, acks=acks)[0]


def examine(run: Path, *, journal: Path | None = None, acks: Iterable[Path] | None = None) -> tuple[Report, History]:
    """The same, and what the journal tells; of a damaged journal that is nothing."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    replay = config["replay"]
    history = History(replay["async_lag"], replay["on_stale"], config["rollout"]["groups_per_step"])
    try:
        records, _ = read(journal or run / "journal")
    except Damage as damage:
        return Report(violations=[f"journal: {damage}"]), history
    for record in records:
        history.apply(record)
    records_of_acks = acks if acks is not None else sorted((run / "logs").glob("acks-*.jsonl"))
    events = [event for path in records_of_acks for event in JsonLines.read(path) if event.get("event") == "ack"]
    acked = {(identity(event["group"]), event["attempt"]) for event in events if event["status"] == "accepted"}
    report = Report(
        acked=len({group for group, _ in acked}),
        repeated_steps=history.repeated_steps,
        leased_again=len(history.reopened),
        lost=history.lost,
        violations=history.wrong,
    )
    if acks is not None and not acked and history.line:
        report.violations.append("no producer has recorded an ack, so nothing is known of lost groups")
    report.lost += [
        f"group {list(group)} attempt {attempt} was acked and is not in the journal"
        for group, attempt in sorted(acked - history.accepted_attempts)
    ]
    _fates(history, report)
    report.violations += ledger_differences(run / "ledger.jsonl", history)
    for row in JsonLines.read(run / "metrics.jsonl"):
        if "training/lag_histogram" not in row:
            continue  # no row of a step
        step = row["training/global_step"]
        above = [lag for lag in row["training/lag_histogram"] if int(lag) > history.bounds.of_step(step)]
        if above:  # after masking
            text = f"metrics: step {step} trained tokens of lag {', '.join(above)}"
            report.violations.append(text)
    return report, history


def _fates(history: History, report: Report) -> None:
    """Every accepted group is trained once, or dropped once, or still in the buffer, and not for too long."""
    trained = Counter(group for commit in history.line.values() for group in commit.groups)
    report.trained = len(trained)
    report.trained_twice += [f"group {list(group)} is in {n} steps" for group, n in trained.items() if n > 1]
    for group, reasons in history.dropped.items():
        report.dropped.update(reasons[:1])
        if len(reasons) > 1:
            report.violations.append(f"group {list(group)} was dropped {len(reasons)} times: {', '.join(reasons)}")
        if group in trained:
            report.violations.append(f"group {list(group)} was dropped ({reasons[0]}) and is trained")
    for group, high in history.held.items():
        if group in trained or group in history.dropped:
            continue
        report.buffered += 1
        limit = high + history.bounds.of_group(group) + 1
        if history.version >= limit:
            report.lost.append(
                f"group {list(group)} was accepted at version {high}, must be trained by step {limit}, and is neither"
                f" trained nor dropped at version {history.version}"
            )


def ledger_differences(path: Path, history: History) -> Iterable[str]:
    """Differences between ledger.jsonl, which the learner writes, and the journal, which replay writes."""
    last: dict[int, int] = {}
    for entry in JsonLines.read(path):
        step, incarnation = entry["step"], entry["incarnation"]
        commit = history.commits.get((step, incarnation))
        if commit is None:
            continue  # both have died, and the commit was still on its way: the next incarnation does the step again
        last[step] = incarnation
        if [tuple(group) for group in entry["groups"]] != list(commit.groups):
            yield f"ledger: step {step} of incarnation {incarnation} has other groups than the journal's take"
        if entry["digest"] != commit.digest:
            yield f"ledger: step {step} of incarnation {incarnation} has another digest than the journal's commit"
    for step, commit in history.line.items():
        if last.get(step) != commit.incarnation:
            yield f"ledger: step {step} of incarnation {commit.incarnation} is missing"
