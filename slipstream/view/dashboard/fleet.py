"""Rollout servers and learner ranks: where they run, what they serve, when they came and went."""

from collections.abc import Mapping, Sequence
from typing import Any

from replay.timeline import ENDED

Row = Mapping[str, Any]

MAX_EVENTS = 300


def of(events: Sequence[Row], last_step: Row) -> dict[str, Any]:
    """Peers by name, and the newest events of the fleet, newest first."""
    peers: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("event") == "ended":
            gone = {"connected": False, "why": ENDED, "state": None}
            peers = {name: {**peer, **gone} if peer.get("connected") else peer for name, peer in peers.items()}
            continue
        name = str(event.get("name", "?"))
        peer = peers.setdefault(name, {"name": name, "joins": 0, "losses": 0, "quarantines": 0, "versions": 0})
        if event.get("event") == "joined":
            peer["joins"] += 1
            peer |= {"connected": True, "since": event.get("time")}
            peer |= {key: event.get(key) for key in ("role", "host", "pid")}
        elif event.get("event") == "lost":
            peer["losses"] += 1
            peer |= {"connected": False, "why": event.get("why"), "since": event.get("time"), "state": None}
        elif event.get("event") == "serves":
            peer["versions"] += 1
            peer |= {"version": event.get("version"), "gauges": event.get("gauges") or {}}
        elif "state" in event:
            peer["quarantines"] += event["state"] == "quarantined"
            peer |= {"state": event["state"], "version": event.get("version"), "since": event.get("time")}
    for name, peer in peers.items():
        peer["restarts"] = max(0, peer["joins"] - 1)
        peer["groups"] = last_step.get(f"rollout/groups/{name}")
    news = ("joined", "lost", "ended")
    shown = [event for event in events if event.get("event") in news or event.get("state") == "quarantined"]
    order = sorted(peers.values(), key=lambda peer: (peer.get("role") != "rollout_server", peer["name"]))
    return {"peers": order, "events": list(reversed(shown[-MAX_EVENTS:]))}
