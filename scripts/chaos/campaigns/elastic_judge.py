"""Whether a run with changing rollout servers was in order, told by its journal, ledger, metrics, logs and probes.

The checker judges groups. Here: which server served what when, and on which proof. A version is proven on a server when
the digest of what its engine held is the one that the learner has put into the journal for it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from learner.report.summary import evaluations, summarize
from scripts.chaos import checker
from scripts.chaos.polling import JsonLines
from scripts.chaos.watch import Probe

FIRST = "first"  # the rollout server that is there from the beginning
MID_UPDATE, FAR = "in the middle of an update", "far from the next one"
EXIT_CODES = {"SIGTERM": 0, "SIGKILL": -9}


@dataclass(slots=True)
class Facts:
    """What only the harness that started the processes knows."""

    steps: int
    target: float | None
    started: dict[str, float] = field(default_factory=dict)  # monotonic time of each rollout server's start
    joins: dict[str, str] = field(default_factory=dict)  # how each late server joined, in words
    leaves: dict[str, str] = field(default_factory=dict)  # signal that ended a server
    leases_left: dict[str, int] = field(default_factory=dict)  # leases that it held then
    exits: dict[str, int] = field(default_factory=dict)  # codes, the learner side's under `learner`
    ranks: list[list[int]] = field(default_factory=list)
    """Pids of the learner ranks before the first join and after the last departure."""
    seconds: float = 0.0


class Judge:
    """Judges one run, of which `work` has run/ and probes/, when all its processes have ended."""

    def __init__(self, work: Path, facts: Facts) -> None:
        self.facts, self.run = facts, work / "run"
        self.probes = {name: Probe(work / "probes" / name) for name in facts.started}
        acks = [probe.record.path for probe in self.probes.values()]
        self.report, self.history = checker.examine(self.run, acks=acks)
        self.rows = JsonLines.read(self.run / "metrics.jsonl")
        self.steps = [row for row in self.rows if "training/lag_histogram" in row]
        counts = [int(row["rollout/servers"]) for row in self.steps]
        self.counts = [counts[0], max(counts), counts[-1]] if counts else []  # at the first step, at most, at the last
        self.unreached = self._unreached()
        self.leases_before_proof = 0

    def verdict(self) -> tuple[dict[str, Any], list[str]]:
        facts, history, report = self.facts, self.history, self.report
        wrong = [*report.as_json()["wrong"], *self._learner(), *self._numbers_of_servers()]
        for name in self.probes:
            wrong += [f"{name}: {text}" for text in (*self._server(name), *self._proofs(name))]
        joins = [self._join(name, how, wrong) for name, how in facts.joins.items()]
        found, sampled = summarize(self.run, None), evaluations(self.rows, "sampled")
        last, target = found["sampled_last3"], facts.target
        reached = target is None or (last is not None and last >= target)
        last = round(last, 4) if last is not None else None
        wrong += [] if reached else [f"reward: {last} at the end, the target is {target}"]
        lives = {name: {e["version"] for e in p.events if e["event"] == "live"} for name, p in self.probes.items()}
        result = {
            "steps": len({row["training/global_step"] for row in self.steps}),
            "servers": self.counts,
            "joins": joins,
            "leaves": [
                {"server": name, "signal": sig, "exit_code": facts.exits[name], "leases_moved": history.moved[name]}
                for name, sig in facts.leaves.items()
            ],
            "groups_by_server": {name: history.trained[name] for name in facts.started},
            "largest_share": self._largest_share(),
            "versions_by_server": {name: len(versions) for name, versions in lives.items()},
            "trained": report.trained,
            "lost": len(report.lost),
            "trained_twice": len(report.trained_twice),
            "violations": len(report.violations),
            "learner_restarts": history.incarnations - 1,
            "leases_before_proof": self.leases_before_proof,
            "reward_first": sampled[0][1] if sampled else None,
            "reward_last": last,
            "target": target,
            "reached": reached,
            "greedy_first": found["greedy_before"],
            "greedy_last": found["greedy_after"],
            "max_lag": found["max_lag"],
            "not_proven_everywhere": {str(version): names for version, names in self.unreached.items()},
            "seconds": facts.seconds,
            "wrong": len(wrong),
        }
        return result, wrong

    def _proofs(self, name: str) -> Iterator[str]:
        """What a server was given before a proof, by the order of what its probe recorded."""
        proven: set[int] = set()
        leases, live = 0, None
        for event in self.probes[name].events:
            match event["event"]:
                case "proven":
                    true = self.history.digests.get(event["version"])
                    if event["digest"] == true:
                        proven.add(event["version"])
                    else:
                        yield f"its engine held {event['digest']} as v{event['version']}, the learner {true}"
                case "live":
                    live = event["version"]
                    if live not in proven:
                        yield f"asked for leases with v{live}, which was not proven on it before"
                case "dark":
                    live = None
                case "lease":
                    leases += 1
                    if live not in proven:
                        self.leases_before_proof += 1
                        yield f"lease {event['group']} came before any proven version was live"
        unproven = self.history.sampled[name] - proven
        if unproven:
            yield f"tokens of versions {sorted(unproven)} that were not proven on it"
        if not leases:
            yield "its probe saw no lease"

    def _server(self, name: str) -> Iterator[str]:
        code, sig = self.facts.exits.get(name), self.facts.leaves.get(name)
        if not self.history.trained[name]:
            yield "none of its groups was trained"
        if sig is None and code != 0:
            yield f"ended with exit code {code}"
        if sig is not None:
            held = self.history.held_by(name)
            if code != EXIT_CODES[sig]:
                yield f"exit code {code} after {sig}, not {EXIT_CODES[sig]}"
            if not self.facts.leases_left[name] or not self.history.moved[name]:
                yield "held no lease when it left, so that nothing had to move"
            if held:
                yield f"{held} leases are still with it"

    def _learner(self) -> Iterator[str]:
        facts, history = self.facts, self.history
        if facts.exits.get("learner") != 0:
            yield f"the learner's launcher ended with exit code {facts.exits.get('learner')}"
        steps = [row["training/global_step"] for row in self.steps]
        if steps != list(range(1, facts.steps + 1)) or history.version != facts.steps:
            yield f"{len(steps)} steps in metrics.jsonl and {history.version} in the journal, not 1 to {facts.steps}"
        if history.incarnations != 1 or history.boots != 1:
            yield f"the learner started {history.incarnations} times, replay {history.boots} times"
        if len(facts.ranks) != 2 or not facts.ranks[0] or facts.ranks[0] != facts.ranks[1]:
            yield f"the learner ranks are not the same processes before and after: {facts.ranks}"
        for version, names in self.unreached.items():
            if not names or set(names) - set(facts.leaves):
                yield f"version {version} was not proven on every server: {', '.join(names) or 'no log says on which'}"

    def _unreached(self) -> dict[int, list[str]]:
        """Versions that some member of the bus did not prove, with the names that the learner's log gives."""
        log = (self.run / "logs" / "learner-0.log").read_text(encoding="utf-8", errors="replace")
        unequal = [row["weight_sync/version"] for row in self.rows if row.get("weight_sync/digests_equal") is False]
        missed: dict[int, list[str]] = {version: [] for version in unequal}
        for version, name in re.findall(r"version (\d+) did not reach '([^']+)'", log):
            missed.setdefault(int(version), []).append(name)
        return missed

    def _largest_share(self) -> float | None:
        """Of a step's groups, how many came from one server: the median over steps with all servers on the bus."""
        full = [row for row in self.steps if row.get("weight_sync/members") == len(self.facts.started)]
        found = [self.history.shares.get(int(row["training/global_step"])) for row in full]
        shares = [max(share.values()) / share.total() for share in found if share]
        return round(median(shares), 3) if shares else None

    def _numbers_of_servers(self) -> Iterator[str]:
        most = len(self.facts.started)
        expected = [1, most, most - len(self.facts.leaves)]
        if self.counts != expected:
            yield f"{self.counts} rollout servers first, at most and last, not {expected}"
        members = max((int(row.get("weight_sync/members", 0)) for row in self.steps), default=0)
        if members != most:
            yield f"at most {members} rollout servers were served by one broadcast, not {most}"

    def _join(self, name: str, how: str, wrong: list[str]) -> dict[str, Any]:
        """How a late server was filled: its numbers; what is wrong with them goes to `wrong`."""
        probe = self.probes[name]
        asked, live, begin, welcome = (probe.first(event) for event in ("join", "live", "begin", "welcome"))
        if asked is None or live is None or begin is None or welcome is None:
            wrong.append(f"{name}: joined and was never served")
            return {"server": name, "how": how}
        later = next((e for e in probe.events if e["event"] == "begin" and e["version"] > live["version"]), None)
        at_once = live["version"] == welcome["version"]
        if how == MID_UPDATE and not self._is_in_an_update(asked["at"]):
            wrong.append(f"{name}: no update was on its way to {FIRST!r} when it joined")
        if how == FAR and not (at_once and later is not None and later["at"] > live["at"]):
            wrong.append(f"{name}: was not filled before the next broadcast")
        return {
            "server": name,
            "how": how,
            "start_seconds": round(asked["at"] - self.facts.started[name], 2),
            "fill_seconds": round(live["at"] - asked["at"], 3),
            "version": live["version"],
            "filled": "at once" if at_once else "by the next broadcast",
            "next_broadcast_seconds": round(later["at"] - asked["at"], 3) if later is not None else None,
        }

    def _is_in_an_update(self, moment: float) -> bool:
        updates = [(e["at"], e["event"]) for e in self.probes[FIRST].events if e["event"] in ("begin", "proven")]
        return any(
            (kind, then) == ("begin", "proven") and begun < moment < ended
            for (begun, kind), (ended, then) in pairwise(updates)
        )
