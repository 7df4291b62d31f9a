"""Replay's view of the run as plain data, for the live view, for tests and for people."""

from typing import TYPE_CHECKING, Any

from replay.desks.buffer import drops
from replay.desks.leases import SlotState

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
        "waiting": waiting(service),
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


def waiting(service: "Service") -> dict[str, Any] | None:
    """Why the batch that was asked for cannot be formed; None while there is no such batch."""
    buffer, desk, step = service.buffer, service.desk, service.buffer.version + 1
    if not service.batch_desk.takes.get(step) or step in service.batch_desk.batches:
        return None
    here, idle, dropped = buffer.count(SlotState.BUFFERED), idle_servers(service), drops(service.counters)
    why = f"batch {step} has {min(here, buffer.groups_per_step)} of {buffer.groups_per_step} groups"
    if dropped:
        why += f"; dropped so far: {', '.join(f'{count} {reason}' for reason, count in dropped.items())}"
    if desk.last_drop:
        why += f"; the last, {desk.last_drop}"
    for server in idle:
        why += f"; {server['name']!r} has no lease: {server['why']}"
    return dict(step=step, why=why, dropped=dropped, last_drop=desk.last_drop, idle_servers=idle)


def idle_servers(service: "Service") -> list[dict[str, Any]]:
    """Rollout servers without a lease although there are prompts to lease: name, policy and why."""
    buffer, found = service.buffer, []
    queued = [slot for slot in buffer.slots.values() if slot.state is SlotState.QUEUED]
    busy = {slot.server for slot in buffer.slots.values() if slot.state is SlotState.LEASED}
    needed = min([slot.min_version for slot in queued], default=buffer.next_min_version())
    for peer in service.peers.role("rollout_server"):
        serves = f"it serves version {peer.version} of incarnation {peer.incarnation}"
        if peer.identity in busy or not (queued or buffer.room > 0):
            continue
        if not peer.capacity:
            why = "it asks for none"
        elif not service.desk.is_on_line(peer):
            why = f"{serves}, which incarnation {service.incarnation} has replaced"
        elif peer.version < needed:
            why = f"{serves}, and the next prompt needs version {needed}"
        else:
            continue
        found.append({"name": peer.name, "version": peer.version, "incarnation": peer.incarnation, "why": why})
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
