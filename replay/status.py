"""Replay's view of the run as plain data, for the live view, for tests and for people."""

from typing import TYPE_CHECKING, Any

from replay.buffer import dropped_by_reason
from replay.leases import SlotState

if TYPE_CHECKING:
    from replay.service import Service


def status_of(service: "Service", now: float) -> dict[str, Any]:
    """The state that a Status message carries (schema: docs/protocol.md)."""
    buffer = service.buffer
    missing = buffer.oldest_missing()
    return {
        "version": buffer.version,
        "incarnation": service.incarnation,
        "async_lag": buffer.async_lag,
        "groups": {
            "leased": buffer.count(SlotState.LEASED),
            "buffered": buffer.count(SlotState.BUFFERED),
            "taken": buffer.count(SlotState.TAKEN),
            "max": buffer.max_groups,
        },
        "oldest_missing": {
            "group": list(missing.group_id),
            "server": _name(service, missing.server),
            "age_s": now - missing.leased_at if missing.leased_at else 0.0,
        }
        if missing is not None
        else None,
        "waits": waits(service, now),
        "no_batch": no_batch(service),
        "peers": [
            {
                "name": peer.name,
                "role": peer.role,
                "version": peer.version if peer.role == "rollout_server" else None,
                "activity": peer.activity,
                "since_s": max(0.0, now - peer.since),
                "silent_s": now - peer.last_heard,
                "leases": sum(slot.server == peer.identity for slot in buffer.slots.values()),
                "groups_accepted": peer.groups_accepted,
                "gauges": peer.gauges,
            }
            for peer in service.peers.by_identity.values()
        ],
        "counters": dict(service.counters),
        "journal_bytes": service.journal.size_bytes,
        "repeats_until": buffer.line.last_committed if buffer.line.last_committed > buffer.version else None,
        "ended": service.ended,
    }


def no_batch(service: "Service") -> dict[str, Any] | None:
    """Why the next batch cannot be formed yet; None once it is, and before a learner is there."""
    buffer, desk, step = service.buffer, service.desk, service.buffer.version + 1
    if service.incarnation == 0 or step in buffer.line.steps:
        return None
    here, idle = buffer.count(SlotState.BUFFERED), idle_servers(service)
    why = f"batch {step} has {min(here, buffer.groups_per_step)} of {buffer.groups_per_step} groups"
    dropped = dropped_by_reason(service.counters)
    if dropped:
        why += f"; dropped so far: {dropped}"
    if desk.last_drop:
        why += f"; the last, {desk.last_drop}"
    for name, problem in idle.items():
        why += f"; {name!r} has no lease: {problem}"
    return {"step": step, "why": why, "dropped": dropped, "last_drop": desk.last_drop, "idle_servers": idle}


def idle_servers(service: "Service") -> dict[str, str]:
    """Why a rollout server holds no lease although there are prompts to lease, by its name."""
    buffer, found = service.buffer, {}
    queued = [slot for slot in buffer.slots.values() if slot.state is SlotState.QUEUED]
    busy = {slot.server for slot in buffer.slots.values() if slot.state is SlotState.LEASED}
    needed = min([slot.min_version for slot in queued], default=buffer.next_min_version())
    for peer in service.peers.role("rollout_server"):
        serves = f"it serves version {peer.version} of incarnation {peer.incarnation}"
        if peer.identity in busy or not (queued or buffer.room > 0):
            continue
        if not peer.capacity:
            found[peer.name] = "it asks for none"
        elif not service.desk.is_on_line(peer):
            found[peer.name] = f"{serves}, which incarnation {service.incarnation} has replaced"
        elif peer.version < needed:
            found[peer.name] = f"{serves}, and the next prompt needs version {needed}"
    return found


def waits(service: "Service", now: float) -> list[dict[str, Any]]:
    """Who waits for whom, in words."""
    found: list[dict[str, Any]] = []
    desk, buffer = service.batch_desk, service.buffer
    step = buffer.version + 1
    servers = service.peers.role("rollout_server")
    if not servers:
        found.append({"who": "replay", "for": "a rollout server", "since_s": now - service.no_server_since})
    if desk.takes.get(step) and step not in desk.batches:
        missing = buffer.oldest_missing()
        what = f"batch {step}"
        if missing is not None:
            where = _name(service, missing.server) or "no server yet"
            what += f" (group {missing.group_id[0]}/{missing.group_id[1]} at {where})"
        found.append({"who": "learner", "for": what, "since_s": now - desk.take_since})
    if servers and buffer.room == 0 and buffer.count(SlotState.QUEUED) + buffer.count(SlotState.LEASED) == 0:
        found.append(
            {"who": "rollout servers", "for": f"room: {buffer.max_groups} groups are in flight", "since_s": 0.0}
        )
    return found


def batch_stats(service: "Service") -> dict[str, float]:
    """Numbers about buffer and servers that go with every batch to metrics.jsonl."""
    servers = service.peers.role("rollout_server")
    idle = [p.gauges["idle_ratio"] for p in servers if "idle_ratio" in p.gauges]
    stats = {
        "buffer/size": float(service.buffer.count(SlotState.BUFFERED)),
        "buffer/leased": float(service.buffer.count(SlotState.LEASED)),
        "buffer/taken": float(service.buffer.count(SlotState.TAKEN)),
        "buffer/dropped": float(sum(n for key, n in service.counters.items() if key.startswith("dropped/"))),
        "buffer/superseded": float(service.counters["superseded"]),
        "buffer/stale_leased_again": float(service.counters["stale_leased_again"]),
        "buffer/tokens_masked": float(service.counters["tokens_masked"]),
        "buffer/partial_tokens_used": float(service.counters["partial_tokens_used"]),
        "buffer/journal_bytes": float(service.journal.size_bytes),
        "rollout/servers": float(len(servers)),
        "rollout/tokens_per_s": sum(p.gauges.get("tokens_per_s", 0.0) for p in servers),
        "reward/error_rate": sum(service.desk.reward_errors) / max(1, len(service.desk.reward_errors)),
    }
    if idle:
        stats["rollout/idle_ratio"] = sum(idle) / len(idle)
    return stats | {f"rollout/groups/{p.name}": float(p.groups_accepted) for p in servers}


def _name(service: "Service", identity: str | None) -> str | None:
    peer = service.peers.get(identity) if identity else None
    return peer.name if peer else None
