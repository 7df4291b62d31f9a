"""The whole examination: a probe at every place, what each finds, what differs, and what lies between them."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from configs.base import ConfigError
from configs.placement import most_devices
from configs.schema import Config
from learner.doctor import compare, disk, links, machine
from learner.doctor.brief import at_start
from learner.doctor.findings import Finding, gathered, refused
from learner.doctor.memory import memory_budget, sizes_of
from learner.doctor.places import Asked, Place, ProbeFailed, ended
from learner.launch import preflight
from replay.channel import ChannelError
from replay.fingerprint import FingerprintError
from replay.prompts import DataError

REFUSALS = (ConfigError, DataError, FingerprintError, ChannelError)
START_S = 60.0
"""Until a probe has started: ssh, an interpreter from a network disk."""
LOOK_S = 60.0
CLOSER = ("shared memory", "limits", "versions", "kernel", "port")
"""Checks of a start that are made again at every place."""


def of_start(config: Config, *, has_input: bool) -> Iterator[Finding]:
    """What the start of a run would refuse, every one of them, what it would say, and the memory budget."""
    yield from at_start(config)
    if not has_input:
        yield Finding("ok", "model and data", "a run makes those of the quick start first (about 10 s)")
    for name, check in preflight.checks(config, has_input=has_input):
        yield gathered(name, check, refusals=REFUSALS, ok="in order")
    here = config.placement.local_rollouts
    yield gathered(
        "packages", lambda: preflight.check_available(config, runs_servers=here), refusals=REFUSALS, ok="in order"
    )
    try:
        budget = memory_budget(config)
    except REFUSALS as error:
        yield refused("memory", error, why="the learner would run out of memory in its first step")
        return
    last = budget.strip().splitlines()[-1].strip() if budget else "the model is on a CPU, or config.json is not here"
    yield Finding("ok", "memory", " ".join(last.split()))


def of_places(
    config: Config, places: Sequence[Place], wanted: Sequence[str], *, has_input: bool = True
) -> tuple[list[Finding], dict[str, Any]]:
    """What is found at places and between them, and the facts that it was made of, by place.

    Args:
        config: of the run.
        places: the first one is that of replay and rank 0.
        wanted: backends of the weight bus to form test groups with.
        has_input: whether the model is there; a quick start makes its own.
    """
    found: list[Finding] = []
    probes: list[Asked] = []
    with ended(probes):
        for place in places:
            try:
                probes.append(Asked.at(place))
            except ProbeFailed as error:
                found.append(_no_probe(place, error))
        answered = []
        for probe in probes:
            try:
                probe.answer(START_S)
                answered.append(probe)
            except ProbeFailed as error:
                found.append(_no_probe(probe.place, error))
        facts, clocks = _facts(answered, found)
        found += compare.compared(config, facts, clocks, has_input=has_input) if facts else []
        with ThreadPoolExecutor(max_workers=max(1, len(answered))) as pool:
            for each in pool.map(lambda probe: list(_place(config, probe, facts)), answered):
                found += each
        if len(answered) == len(places):
            found += links.examined(config, answered, wanted)
    return found, {str(place): its for place, its in facts.items()}


def _no_probe(place: Place, error: ProbeFailed) -> Finding:
    mend = f"see that `{place.command[0]} ...` works from this shell, with the same checkout and packages there"
    if place.host is None:
        mend = "--rollout-python names the interpreter of rollout servers; install slipstream-rl there"
    return Finding("stop", "place", str(error), why="nothing of a run would start there", mend=mend, node=str(place))


def _facts(
    probes: Sequence[Asked], found: list[Finding]
) -> tuple[dict[Place, dict[str, Any]], dict[Place, tuple[float, float]]]:
    facts: dict[Place, dict[str, Any]] = {}
    clocks: dict[Place, tuple[float, float]] = {}
    for probe in probes:
        try:
            before = time.time()
            there = float(probe.ask("clock", LOOK_S))
            after = time.time()
            clocks[probe.place] = (there - (before + after) / 2, (after - before) / 2)
            facts[probe.place] = probe.ask("facts", LOOK_S)
        except ProbeFailed as error:
            found.append(_no_probe(probe.place, error))
    return facts, clocks


def _place(config: Config, probe: Asked, facts: dict[Place, dict[str, Any]]) -> Iterator[Finding]:
    """One place by itself; what a node has once is looked at from its first place."""
    place, sizes = probe.place, sizes_of(config)
    if place not in facts:
        return
    node = place.node if len({each.node for each in facts}) > 1 else ""
    its, modules = facts[place], machine.needed_kernels(config, place.role)

    def gpus() -> Iterator[Finding]:
        (wanted,) = [most_devices(share) for share in config.shares if share.node == place.node]
        yield from machine.devices(config, probe.ask("devices", LOOK_S), wanted, node)

    def ports() -> Iterator[Finding]:
        yield from machine.ports(probe.ask("ports", LOOK_S, wanted=dict(place.ports)), place)

    def disk_speed() -> Iterator[Finding]:
        yield from disk.speed(config, sizes, _speed(config, probe))

    def kernels() -> Iterator[Finding]:
        yield from machine.kernels(probe.ask("kernels", LOOK_S, modules=modules), its["compiler"], str(place))

    looks: dict[str, Callable[[], Iterator[Finding]]] = {}
    if next(each for each in facts if each.node == place.node) is place:
        engines = machine.engines_on(config, place.node)
        yield machine.shared_memory(config, sizes, its["shared_memory"], engines, node)
        yield from machine.limits(its["limits"], node)
        looks["GPU"] = gpus
    if place.ports:
        looks["port"] = ports
    if place.role == "learner" and place.node == config.learner_nodes[0]:
        looks["disk speed"] = disk_speed
    if modules:
        looks["kernel"] = kernels
    for check, look in looks.items():
        try:
            yield from look()
        except ProbeFailed as error:
            yield Finding("warn", check, f"could not be examined: {error}", node=str(place))


def _speed(config: Config, probe: Asked) -> float | str:
    try:
        return float(probe.ask("disk", LOOK_S, folder=config.run_dir))
    except ProbeFailed as error:
        return str(error)
