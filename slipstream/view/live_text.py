"""The live view as text: progress, rewards, lag, speed, and what each process waits for.

Everything here is a function of the rows of metrics.jsonl and of replay's Status.state (schema: replay/status.py);
no terminal, no clock. Any key may be missing: before replay and the learner have met, most are.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from learner.record.metrics import evaluation_scores

Row = Mapping[str, Any]
Status = Mapping[str, Any]
"""Replay's Status.state; empty before replay has answered."""

BLOCKS = "▁▂▃▄▅▆▇█"
NOTHING = "–"
KEPT = 64
"""Rows of steps that a live view needs: a run of a week has a hundred thousand."""
ETA_STEPS = 20
"""Steps over which the speed is taken for the ETA."""
SPLIT_STEPS, SPLIT_IDLE = 40, 0.2
"""Steps whose idle shares say which side has a GPU to give, and from which share on."""
REWARD = "critic/score/mean"
LOSSES = ("sft/loss",)
"""Of objectives that learn from answers in the data: what is shown in place of rewards."""
LAG_MEAN = "training/off_policy/trajectory_staleness/mean"
LAG_MAX = "training/off_policy/trajectory_staleness/max"
GOOD_COUNTERS = {"groups_accepted", "groups_trained", "checkpoints", "partials_used", "partial_tokens_used"}
GOOD_COUNTERS |= {"answers_kept", "tokens_kept", "tokens_left_out"}
LOST = {"poison", "interrupted", "too_slow", "broken_row", "prompt_too_long", "prompt_not_rendered"}
"""Reasons for which a prompt is dropped against the user's wish."""


@dataclass(slots=True)
class MetricRows:
    """The rows read so far."""

    total_steps: int
    async_lag: int
    steps: list[Row] = field(default_factory=list)
    """Rows of the last `kept` steps, one each, ascending."""
    rewards: list[tuple[int, float | None]] = field(default_factory=list)
    """Step and mean reward, or loss of the data, of all steps."""
    evaluations: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """Version to mode (`greedy`, `sampled`) to mean reward."""
    kept: int | None = KEPT
    """None for all of them."""
    split: tuple[int, int] | None = None
    """GPUs of rollouts and of the learner, where each side has its own on one machine."""

    def add(self, row: Row) -> None:
        """Add a row; the row of a repeated step replaces the old one and its successors."""
        if "step" in row:
            while self.steps and self.steps[-1]["step"] >= row["step"]:
                self.steps.pop()
            while self.rewards and self.rewards[-1][0] >= row["step"]:
                self.rewards.pop()
            self.steps.append(row)
            self.rewards.append((row["step"], row.get(worth_of(row))))
            if self.kept is not None:
                del self.steps[: -self.kept]
        elif scores := evaluation_scores(row):
            self.evaluations.setdefault(int(row.get("version", 0)), {}).update(scores)

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def last(self) -> Row:
        """Row of the last finished step, empty before the first."""
        return self.steps[-1] if self.steps else {}

    def eta_s(self) -> float | None:
        """Remaining seconds at the median speed of the last steps (a restart does not count); None before two."""
        recent = [row for row in self.steps[-ETA_STEPS - 1 :] if "time" in row]
        if len(recent) < 2:
            return None
        pairs = itertools.pairwise(recent)
        step_s = statistics.median((b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairs)
        return max(0.0, float(step_s) * (self.total_steps - self.step))


def number(value: float | None, digits: int = 2) -> str:
    """A number of so many decimals; a dash for None."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """`870`, `5.1k`, `1.2M`; a dash for None."""
    if value is None:
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def percent(share: float | None) -> str:
    """`31%`; a dash for None."""
    return NOTHING if share is None else f"{100 * share:.0f}%"


def duration(seconds: float | None) -> str:
    """`0.4s`, `24s`, `3m10s`, `2h05m`; a dash for None."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: Iterable[float | None], width: int = 60) -> str:
    """The last `width` values as blocks between their lowest and highest; a dot for None."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BLOCKS) - 1
    return "".join(
        "·" if value is None else BLOCKS[round((value - low) / span * top) if span else top // 2] for value in shown
    )


def worth_of(row: Row) -> str:
    """The metric that says what a step came to."""
    return REWARD if REWARD in row else next((name for name in LOSSES if name in row), REWARD)


def title_of(row: Row) -> str:
    """`reward`, or `sft loss`."""
    return "reward" if (name := worth_of(row)) == REWARD else name.replace("/", " ")


def step_line(progress: MetricRows) -> str:
    """The line of the last step in plain mode."""
    row = progress.last
    is_sampled = worth_of(row) == REWARD
    lag = f"  lag {number(row.get(LAG_MEAN), 1)}/{progress.async_lag}" if is_sampled else ""
    rollout = f" rollout {percent(row.get('rollout/idle_ratio'))}" if is_sampled else ""
    return (
        f"step {progress.step}/{progress.total_steps}"
        f"  {title_of(row)} {number(row.get(worth_of(row)), 2 if is_sampled else 3)}"
        f"{lag}"
        f"  tok/s {count(row.get('perf/learner_tokens_per_s'))}"
        f"  idle learner {percent(row.get('trainer/idle_ratio'))}{rollout}"
        f"  eta {duration(progress.eta_s())}"
    ) + (f"  {lost}" if (lost := lost_text(row)) else "")


def lost_text(row: Row) -> str:
    """`left out 12 answers (12 reward_error, 31 tokens each, kept ones 25), 3 prompts (3 poison)`, or empty."""
    failed = [f"{value:.0f} {code}" for code, value in _by_reason(row, "answers/failed/")]
    dropped = [(reason, value) for reason, value in _by_reason(row, "buffer/dropped/") if reason in LOST]
    parts = []
    if failed:
        if (length := row.get("answers/left_out_length")) is not None:
            failed += [f"{count(length)} tokens each", f"kept ones {count(row.get('answers/kept_length'))}"]
        parts.append(f"{row.get('answers/left_out', 0):.0f} answers ({', '.join(failed)})")
    if dropped:
        total, reasons = sum(value for _, value in dropped), ", ".join(f"{value:.0f} {name}" for name, value in dropped)
        parts.append(f"{total:.0f} prompts ({reasons})")
    return f"left out {', '.join(parts)}" if parts else ""


def _by_reason(row: Row, prefix: str) -> list[tuple[str, float]]:
    """What is above 0 of the counts below a prefix, by its last part."""
    return sorted(
        (name.removeprefix(prefix), value) for name, value in row.items() if name.startswith(prefix) and value
    )


def scores(values: Mapping[str, float | None]) -> str:
    """`greedy 0.83  sampled 0.71`."""
    return "  ".join(f"{mode} {number(value)}" for mode, value in sorted(values.items()))


def evaluation_line(row: Row) -> str:
    """The line of an evaluation in plain mode."""
    return f"evaluation of version {row.get('version', NOTHING)}  {scores(evaluation_scores(row))}"


def last_evaluation(progress: MetricRows) -> str:
    """The newest evaluation beside the first one, in one line."""
    if not progress.evaluations:
        return NOTHING
    first, newest = min(progress.evaluations), max(progress.evaluations)
    text = f"{scores(progress.evaluations[newest])}  at version {newest}"
    return text if newest == first else f"{text}  (version {first}: {scores(progress.evaluations[first])})"


def facts(progress: MetricRows, status: Status) -> dict[str, str]:
    """What the panel says beside step and reward, by its title; what there is nothing to say of is left out."""
    row = progress.last
    idle = f"learner {percent(row.get('trainer/idle_ratio'))}, rollout {percent(row.get('rollout/idle_ratio'))}"
    counters = sorted((status.get("counters") or {}).items())
    found = {
        "evaluation": last_evaluation(progress),
        "lag": f"mean {number(row.get(LAG_MEAN))}  max {number(row.get(LAG_MAX), 0)}  bound {progress.async_lag}",
        "speed": f"{count(row.get('perf/learner_tokens_per_s'))} tok/s   idle: {idle}",
        "groups": groups_text(status),
        "waiting": waiting_text(status),
        "split": split_text(progress),
        "trouble": "  ".join(f"{name} {value}" for name, value in counters if value and name not in GOOD_COUNTERS),
    }
    return {name: text for name, text in found.items() if text}


def split_text(progress: MetricRows) -> str:
    """`idle learner 3%, rollout 41%: move a GPU ... (placement.split 6:2 -> 5:3)`, or empty."""
    recent = [row for row in progress.steps[-SPLIT_STEPS:] if row.get("rollout/idle_ratio") is not None]
    if progress.split is None or len(recent) < SPLIT_STEPS:
        return ""
    rollout, learner = progress.split
    idle = {
        "learner": statistics.fmean(row.get("trainer/idle_ratio") or 0.0 for row in recent),
        "rollout": statistics.fmean(row["rollout/idle_ratio"] for row in recent),
    }
    giver, taker = sorted(idle, key=lambda side: -idle[side])
    moved = 1 if giver == "learner" else -1
    if idle[giver] < SPLIT_IDLE or idle[giver] < 2 * idle[taker] or min(rollout + moved, learner - moved) < 1:
        return ""
    return (
        f"idle learner {percent(idle['learner'])}, rollout {percent(idle['rollout'])}: move a GPU from {giver} to"
        f" {taker} (placement.split {rollout}:{learner} -> {rollout + moved}:{learner - moved})"
    )


def groups_text(status: Status) -> str:
    """Where the admitted groups are."""
    groups = status.get("groups") or {}
    if not groups:
        return NOTHING
    places = {place: groups.get(place, 0) for place in ("leased", "buffered", "taken")}
    parts = " · ".join(f"{num_groups} {place}" for place, num_groups in places.items())
    return f"{parts} = {sum(places.values())} of {groups.get('max', NOTHING)} in flight"


def waiting_text(status: Status) -> str:
    """What is waited for and why, in words."""
    if not status:
        return "replay, the learner and the rollout servers are starting"
    if status.get("ended"):
        return f"the run has ended: {status['ended']}"
    waits = [_wait(wait) for wait in status.get("waits") or []]
    if waits:
        return "; ".join(waits)
    return "no process waits"


def _wait(wait: Mapping[str, Any]) -> str:
    who, what, since = str(wait.get("who", "?")), str(wait.get("for", "?")), wait.get("since_s") or 0.0
    how_long = f" {duration(since)}" if since > 0 else ""
    return f"{who} wait{'' if wait.get('code') in ('room', 'teacher') else 's'}{how_long} for {what}"


PEER_COLUMNS = ("peer", "version", "doing", "for", "heard", "leases", "groups", "tok/s", "idle")


def peer_rows(progress: MetricRows, status: Status) -> list[tuple[str, ...]]:
    """One row of PEER_COLUMNS per rollout server and learner rank, rollout servers first."""
    peers = [peer for peer in status.get("peers") or [] if peer.get("role") != "launcher"]
    peers.sort(key=lambda peer: (peer.get("role") != "rollout_server", str(peer.get("name"))))
    return [_peer(progress, peer) for peer in peers]


def _peer(progress: MetricRows, peer: Mapping[str, Any]) -> tuple[str, ...]:
    gauges = peer.get("gauges") or {}
    serves = peer.get("role") == "rollout_server"
    idle = gauges.get("idle_ratio") if serves else progress.last.get("trainer/idle_ratio")
    version = peer.get("version")
    return (
        str(peer.get("name", "?")),
        NOTHING if version is None else f"v{version}",
        str(peer.get("activity") or NOTHING),
        duration(peer.get("since_s")) if peer.get("activity") else NOTHING,
        f"{duration(peer.get('silent_s'))} ago",
        count(peer.get("leases")) if serves else NOTHING,
        count(peer.get("groups_accepted")) if serves else NOTHING,
        count(gauges.get("tokens_per_s")),
        percent(idle),
    )


def closing_line(progress: MetricRows) -> str:
    """What the run came to, in one line; empty when no step was made."""
    rewards: list[float] = [reward for _, reward in progress.rewards if reward is not None]
    if not rewards:
        return ""
    title, last = title_of(progress.last), statistics.fmean(rewards[-5:])
    text = f"{title} {number(rewards[0])} → {number(last)} after {progress.step} steps"
    if len(progress.evaluations) > 1:
        first, newest = min(progress.evaluations), max(progress.evaluations)
        before, after = progress.evaluations[first], progress.evaluations[newest]
        shared = sorted(before.keys() & after.keys())
        parts = [f"{mode} {number(before[mode])} → {number(after[mode])}" for mode in shared]
        text += f"; from version {first} to {newest}: {', '.join(parts)}"
    return text + (f"; {lost}" if (lost := lost_text(progress.last)) else "")
