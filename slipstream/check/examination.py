"""Doctor's closer look: a probe at every place, what each finds, what differs, and what lies between them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.placement import most_devices
from configs.schema import Config
from slipstream.check import compare, links, machine
from slipstream.check.finding import Finding, stop
from slipstream.check.memory import sizes_of
from slipstream.check.places import Place, ProbeFailed, RunningProbe, ended

START_S = 60.0
"""Until a probe has started: ssh, an interpreter from a network disk."""
LOOK_S = 90.0
"""It imports kernels and asks nvidia-smi."""


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
    probes: list[RunningProbe] = []
    answered: list[RunningProbe] = []
    facts: dict[Place, dict[str, Any]] = {}
    clocks: dict[Place, tuple[float, float]] = {}
    firsts = {place.node: place for place in reversed(places)}
    """Where what a node has once is looked at."""
    with ended(probes):
        for place in places:
            try:
                probes.append(RunningProbe.at(place))
            except ProbeFailed as error:
                found.append(_no_probe(place, error))
        for probe in probes:
            place = probe.place
            try:
                probe.answer(START_S)
                before = time.time()
                there = float(probe.ask("clock", LOOK_S))
                after = time.time()
                clocks[place] = (there - (before + after) / 2, (after - before) / 2)
                is_first, modules = firsts[place.node] is place, machine.needed_kernels(config, place.role)
                probe.send("look", modules=modules, ports=dict(place.ports), is_first=is_first)
                answered.append(probe)
            except ProbeFailed as error:
                found.append(_no_probe(place, error))
        for probe in answered:  # they look at once
            try:
                facts[probe.place] = probe.answer(LOOK_S)
            except ProbeFailed as error:
                found.append(_no_probe(probe.place, error))
        found += compare.compared(config, facts, clocks, has_input=has_input) if facts else []
        for place, its in facts.items():
            found += _place(config, place, its, is_first=firsts[place.node] is place, is_alone=len(firsts) == 1)
        if len(facts) == len(places):
            found += links.examined(config, answered, wanted)
    return found, {str(place): its for place, its in facts.items()}


def _no_probe(place: Place, error: ProbeFailed) -> Finding:
    mend = f"see that `{place.command[0]} ...` works from this shell, with the same checkout and packages there"
    if place.is_here:
        mend = "--rollout-python names the interpreter of rollout servers; install slipstream-rl there"
    return stop("place", str(error), why="nothing of a run would start there", mend=mend, node=str(place))


def _place(
    config: Config, place: Place, its: Mapping[str, Any], *, is_first: bool, is_alone: bool
) -> Iterator[Finding]:
    """One place by itself; what a node has once is looked at from its first place."""
    if is_first:
        node = "" if is_alone else place.node
        (wanted,) = [most_devices(share) for share in config.shares if share.node == place.node]
        engines = machine.engines_on(config, place.node)
        yield machine.shared_memory(config, sizes_of(config), its["shared_memory"], engines, node)
        yield machine.limits(its["open_files"], node)
        yield from machine.devices(config, its["devices"], wanted, node)
    if place.ports:
        yield from machine.ports(place.ports, its["ports"], str(place))
    yield from machine.kernels(its["kernels"], its["compiler"], str(place))
