"""Whether a run with changing rollout servers was in order, told by its journal, ledger, metrics, logs and witnesses.

Groups are judged by the checker of scripts/chaos. Here: who served what when, and on whose proof. A version counts as
proven on a server when the digest of what its engine held is the one that the learner has put into the journal for it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from learner.report.summary import evaluations, summarize
from scripts.chaos.checker import Report, check
from scripts.chaos.journal import read
from scripts.elastic.account import Account, Diary
from scripts.elastic.plan import FIRST
from scripts.elastic.run import Facts
from scripts.elastic.witness import diary_of


@dataclass(slots=True)
class Proof:
    """What one rollout server did before and after its proofs."""

    versions: set[int] = field(default_factory=set)
    """Proven ones."""
    leases: int = 0
    leases_before_proof: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """The line of JSON, and everything that is not in order."""

    result: dict[str, Any]
    wrong: list[str]


class Judge:
    """Judges one run when all its processes have ended.

    Args:
        work: folder with run/, witnesses/ and the facts.
    """

    def __init__(self, work: Path, facts: Facts) -> None:
        self.facts, self.run = facts, work / "run"
        self.diaries = {name: Diary(diary_of(work / "witnesses", name)).poll() for name in facts.started}
        self.account = Account()
        self.report: Report = check(self.run, acks=[diary.path for diary in self.diaries.values()])
        if not self.report.violations or not self.report.violations[0].startswith("journal:"):
            for record in read(self.run / "journal")[0]:
                self.account.tell(record)
        self.rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        self.steps = [row for row in self.rows if "training/lag_histogram" in row]
        self.proofs = {name: proof_of(name, diary, self.account.digests) for name, diary in self.diaries.items()}

    def verdict(self) -> Verdict:
        """All rules, and the numbers."""
        joins = [self._join(name) for name in self.facts.joins]
        wrong = [
            *self.report.as_json()["wrong"],
            *self._learner(),
            *self._numbers_of_servers(),
            *self._servers(),
            *self._departures(),
            *(words for proof in self.proofs.values() for words in proof.wrong),
            *(words for join in joins for words in join.pop("wrong")),
        ]
        reward = self._reward()
        if not reward["reached"]:
            wrong.append(f"reward: {reward['reward_last']} at the end, the target is {reward['target']}")
        return Verdict(self._result(joins, reward, wrong), wrong)

    def _result(self, joins: list[dict[str, Any]], reward: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
        facts, account = self.facts, self.account
        found = summarize(self.run, None)
        return {
            "steps": len({row["training/global_step"] for row in self.steps}),
            "servers": self._counts(),
            "joins": joins,
            "leaves": [
                {"server": name, "signal": sig, "exit_code": facts.exits[name], "leases_moved": account.moved[name]}
                for name, sig in facts.leaves.items()
            ],
            "groups_by_server": {name: account.trained[name] for name in facts.started},
            "largest_share": self._largest_share(),
            "versions_by_server": {name: len(set(diary.versions("live"))) for name, diary in self.diaries.items()},
            "trained": self.report.trained,
            "lost": len(self.report.lost),
            "trained_twice": len(self.report.trained_twice),
            "violations": len(self.report.violations),
            "learner_restarts": account.incarnations - 1,
            "leases_before_proof": sum(proof.leases_before_proof for proof in self.proofs.values()),
            **reward,
            "greedy_first": found["greedy_before"],
            "greedy_last": found["greedy_after"],
            "max_lag": found["max_lag"],
            "not_proven_everywhere": {str(version): names for version, names in self._unreached().items()},
            "seconds": facts.seconds,
            "wrong": len(wrong),
        }

    # ---- rules -----------------------------------------------------------------------------------------

    def _learner(self) -> Iterator[str]:
        facts, account = self.facts, self.account
        if facts.exits.get("learner") != 0:
            yield f"the learner's launcher ended with exit code {facts.exits.get('learner')}"
        steps = [row["training/global_step"] for row in self.steps]
        if steps != list(range(1, facts.steps + 1)) or account.version != facts.steps:
            yield f"{len(steps)} steps in metrics.jsonl and {account.version} in the journal, not 1 to {facts.steps}"
        if account.incarnations != 1 or account.boots != 1:
            yield f"the learner started {account.incarnations} times, replay {account.boots} times"
        if len(facts.ranks) != 2 or not facts.ranks[0] or facts.ranks[0] != facts.ranks[1]:
            yield f"the learner ranks are not the same processes before and after: {facts.ranks}"
        for version, names in self._unreached().items():
            if not names or set(names) - set(facts.leaves):
                yield f"version {version} was not proven on every server: {', '.join(names) or 'no log says on which'}"

    def _unreached(self) -> dict[int, list[str]]:
        """Versions that some member of the bus did not prove, with the names that the learner's log gives."""
        log = (self.run / "logs" / "learner-0.log").read_text(encoding="utf-8", errors="replace")
        missed: dict[int, list[str]] = {}
        for version, name in re.findall(r"version (\d+) did not reach '([^']+)'", log):
            missed.setdefault(int(version), []).append(name)
        unequal = [row["weight_sync/version"] for row in self.rows if row.get("weight_sync/digests_equal") is False]
        return {version: missed.get(version, []) for version in {*unequal, *missed}}

    def _counts(self) -> list[int]:
        """Rollout servers of replay at the first step, at most, and at the last one."""
        counts = [int(row["rollout/servers"]) for row in self.steps]
        return [counts[0], max(counts), counts[-1]] if counts else []

    def _largest_share(self) -> float | None:
        """Of a step's groups, how many came from one server: the median over steps with all servers on the bus."""
        most = len(self.facts.started)
        full = [int(row["training/global_step"]) for row in self.steps if row.get("weight_sync/members") == most]
        shares = [max(share.values()) / share.total() for step in full if (share := self.account.shares.get(step))]
        return round(median(shares), 3) if shares else None

    def _numbers_of_servers(self) -> Iterator[str]:
        most = len(self.facts.started)
        expected = [1, most, most - len(self.facts.leaves)]
        if self._counts() != expected:
            yield f"{self._counts()} rollout servers first, at most and last, not {expected}"
        members = max((int(row.get("weight_sync/members", 0)) for row in self.steps), default=0)
        if members != most:
            yield f"at most {members} rollout servers were served by one broadcast, not {most}"

    def _servers(self) -> Iterator[str]:
        for name, proof in self.proofs.items():
            if not self.account.trained[name]:
                yield f"{name}: none of its groups was trained"
            unproven = self.account.sampled.get(name, set()) - proof.versions
            if unproven:
                yield f"{name}: tokens of versions {sorted(unproven)} that were not proven on it"
            if proof.leases == 0:
                yield f"{name}: its witness saw no lease"
            if name not in self.facts.leaves and self.facts.exits.get(name) != 0:
                yield f"{name}: ended with exit code {self.facts.exits.get(name)}"

    def _departures(self) -> Iterator[str]:
        codes = {"SIGTERM": 0, "SIGKILL": -9}
        for name, sig in self.facts.leaves.items():
            if self.facts.exits.get(name) != codes[sig]:
                yield f"{name}: exit code {self.facts.exits.get(name)} after {sig}, not {codes[sig]}"
            if not self.facts.leases_left[name] or not self.account.moved[name]:
                yield f"{name}: held no lease when it left, so that nothing had to move"
            if self.account.held_by(name):
                yield f"{name}: {self.account.held_by(name)} leases are still with it"

    def _join(self, name: str) -> dict[str, Any]:
        """How a late server was filled: its numbers, and what is wrong with them."""
        diary, how = self.diaries[name], self.facts.joins[name]
        asked, live = diary.first("join"), diary.first("live")
        begin, welcome = diary.first("begin"), diary.first("welcome")
        if asked is None or live is None or begin is None or welcome is None:
            return {"server": name, "how": how, "wrong": [f"{name}: joined and was never served"]}
        later = next((e for e in diary.events if e["event"] == "begin" and e["version"] > live["version"]), None)
        at_once = live["version"] == welcome["version"]
        found = {
            "server": name,
            "how": how,
            "start_seconds": round(asked["at"] - self.facts.started[name], 2),
            "fill_seconds": round(live["at"] - asked["at"], 3),
            "version": live["version"],
            "filled": "at once" if at_once else "by the next broadcast",
            "next_broadcast_seconds": round(later["at"] - asked["at"], 3) if later is not None else None,
            "wrong": [],
        }
        if how == "in the middle of an update" and self._update_around(asked["at"]) is None:
            found["wrong"].append(f"{name}: no update was on its way to {FIRST!r} when it joined")
        if how == "far from the next one" and not (at_once and later is not None and later["at"] > live["at"]):
            found["wrong"].append(f"{name}: was not filled before the next broadcast")
        return found

    def _update_around(self, moment: float) -> int | None:
        """Version that was on its way to the first server at this moment."""
        begun: dict[str, Any] | None = None
        for event in self.diaries[FIRST].events:
            if event["event"] == "begin":
                begun = event
            elif event["event"] == "proven" and begun is not None and begun["at"] < moment < event["at"]:
                return int(event["version"])
        return None

    def _reward(self) -> dict[str, Any]:
        sampled, target = evaluations(self.rows, "sampled"), self.facts.target
        last = summarize(self.run, None)["sampled_last3"]
        return {
            "reward_first": sampled[0][1] if sampled else None,
            "reward_last": round(last, 4) if last is not None else None,
            "target": target,
            "reached": target is None or (last is not None and last >= target),
        }


def proof_of(name: str, diary: Diary, digests: dict[int, str]) -> Proof:
    """Read a witness's lines in their order: what was proven, and whether anything came before that.

    Args:
        name: of the rollout server.
        diary: its witness's.
        digests: of the learner's weights by version, from the journal.
    """
    proof = Proof()
    live: int | None = None
    for event in diary.events:
        match event["event"]:
            case "proven":
                if event["digest"] == digests.get(event["version"]):
                    proof.versions.add(event["version"])
                else:
                    proof.wrong.append(
                        f"{name}: its engine held {event['digest']} as v{event['version']}, the learner"
                        f" {digests.get(event['version'])}"
                    )
            case "live":
                live = event["version"]
                if live not in proof.versions:
                    proof.wrong.append(f"{name}: asked for leases with v{live}, which was not proven on it before")
            case "dark":
                live = None
            case "lease":
                proof.leases += 1
                if live is None or live not in proof.versions:
                    proof.leases_before_proof += 1
                    proof.wrong.append(f"{name}: lease {event['group']} came before any proven version was live")
    return proof
