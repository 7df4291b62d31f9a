"""The whole state of replay as plain data, groups by their place in the journal, and back. No socket."""

from collections import deque
from typing import Any

import msgpack

from configs.limits import GUARDS
from configs.schema import Config
from configs.shared import shared_values
from replay.journal.format import Location
from replay.state.evaluation_parts import EvaluationPart
from replay.state.evaluations import Evaluation, PartResult
from replay.state.leases import GroupId, Slot, SlotState
from replay.state.line import LineStep, Lost, PolicyLine, TakenGroup
from replay.state.run import RunState

KEPT = ("min_version", "async_lag", "attempt", "server", "stale_retries", "failures", "interruptions", "voided")
"""Of a slot, as it is."""


DECIDING = ("algorithm.", "learner.", "model.", *(f"limits.{guard}" for guard in GUARDS))
"""Beginnings of the keys that decide which weights a step makes of its groups."""
INDIFFERENT = {
    *("learner.total_steps", "learner.restarts", "learner.batch_deadline_s", "learner.collective_deadline_s"),
    "limits.nonfinite_steps",
}
"""Those of them that say only when a run ends, waits or starts again."""


def settings_of(config: Config) -> dict[str, Any]:
    """What a run must keep for its journal to go on, beside its data, and for its digests to come again."""
    learner = config.learner
    shared = shared_values(config).items()
    deciding = {key: value for key, value in shared if key.startswith(DECIDING) and key not in INDIFFERENT}
    end = 0 if learner.schedule == "constant" else learner.decay_steps or learner.total_steps
    deciding["learner.decay_steps"] = str(end)
    scoring = config.scoring
    scored = {} if scoring is None else {"scores": f"{', '.join(scoring.names)} with top {scoring.k}"}
    return {
        "deciding": deciding,
        "groups_per_step": config.rollout.groups_per_step,
        "group_size": config.rollout.group_size,
        "async_lag": config.replay.async_lag,
        "on_stale": config.replay.on_stale,
        "seed": config.run.seed,
        "temperature": config.rollout.temperature,
    } | scored


def snapshot_of(run: RunState) -> dict[str, Any]:
    buffer, board, policies = run.buffer, run.board, run.policies
    return {
        "run": settings_of(run.config),
        "version": buffer.version,
        "incarnation": policies.incarnation,
        "bus_address": run.bus_address,
        "started": list(run.started),
        "source": run.source.state(),
        "again": list(run.again),
        "gone": list(policies.lost),
        "published": policies.published,
        "flat_drops": run.flat_drops,
        "fruitless": buffer.fruitless,
        "proceeding": run.proceeding,
        "counters": dict(run.counters),
        "slots": [_plain_slot(slot) for slot in buffer.slots.values()],
        "initial": buffer.line.initial,
        "line": [
            [step, made.digest, made.async_lag, made.is_masked, made.packed]
            for step, made in sorted(buffer.line.steps.items())
        ],
        "async_lag": [buffer.async_lag, buffer.configured_lag],
        "evaluations": {
            "open": [[e.version, list(e.open_parts), list(e.tried), e.server] for e in board.open.values()],
            "closed": [[version, reason] for version, reason in board.closed.items()],
            "results": [
                [version, part, *each] for version, parts in board.results.items() for part, each in parts.items()
            ],
        },
    }


def take_over(run: RunState, fields: dict[str, Any], now: float) -> None:
    """The inverse of `snapshot_of`, but for the groups themselves, which stay in the journal."""
    buffer, board, policies = run.buffer, run.board, run.policies
    buffer.version, run.flat_drops, run.proceeding = fields["version"], fields["flat_drops"], fields["proceeding"]
    buffer.fruitless = fields["fruitless"]
    async_lag, configured = fields["async_lag"]
    buffer.async_lag = async_lag if configured == buffer.configured_lag else buffer.async_lag
    policies.incarnation, policies.published = fields["incarnation"], fields["published"]
    policies.lost = [Lost(*lost) for lost in fields["gone"]]
    run.bus_address, run.started = fields["bus_address"], list(fields["started"])
    run.source.restore(fields["source"])
    run.again = deque(group_id_of(group) for group in fields["again"])
    run.counters.clear()
    run.counters.update(fields["counters"])
    buffer.slots = {slot.group_id: slot for slot in (_slot_of(run, plain, now) for plain in fields["slots"])}
    line_from(buffer.line, fields)
    for version, parts, tried, server in fields["evaluations"]["open"]:
        board.open[version] = Evaluation(version, [EvaluationPart.of(part) for part in parts], now, server, list(tried))
    board.closed.update({version: reason for version, reason in fields["evaluations"]["closed"]})
    for version, part, place, asked in fields["evaluations"]["results"]:
        board.results.setdefault(version, {})[EvaluationPart.of(part)] = PartResult(Location.of(place), asked)


def line_from(line: PolicyLine, fields: dict[str, Any]) -> None:
    line.steps.clear()
    line.initial = (fields["initial"][0], fields["initial"][1]) if fields["initial"] is not None else None
    for step, digest, async_lag, is_masked, packed in fields["line"]:
        taken = [taken_of(plain) for plain in msgpack.unpackb(packed)]
        line.steps[step] = LineStep(taken, async_lag, is_masked, digest)


def _plain_slot(slot: Slot) -> dict[str, Any]:
    plain = {"group": slot.group_id, "state": slot.state.value, "location": slot.location}
    return plain | {name: getattr(slot, name) for name in KEPT}


def _slot_of(run: RunState, plain: dict[str, Any], now: float) -> Slot:
    group_id = group_id_of(plain["group"])
    slot = Slot(group_id, run.source.row(group_id[1]), plain["min_version"], SlotState(plain["state"]))
    for name in KEPT:
        setattr(slot, name, plain[name])
    slot.location = Location.of(plain["location"]) if plain["location"] is not None else None
    slot.leased_at = slot.progress_at = now
    slot.begun_at = now if slot.attempt else None
    return slot


def taken_of(plain: list[Any]) -> TakenGroup:
    group, attempt, min_version, location = plain
    return TakenGroup(group_id_of(group), attempt, min_version, Location.of(location))


def group_id_of(plain: list[int]) -> GroupId:
    pass_, index = plain
    return int(pass_), int(index)
