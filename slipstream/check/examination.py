"""Doctor's closer look: a probe at every place, what each finds, what differs, and what lies between them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from configs.placement import most_devices
from configs.schema import Config
from slipstream.check import compare, links, machine
from slipstream.check.finding import Finding, stop, warn
from slipstream.check.memory import sizes_of
from slipstream.check.places import Asked, Place, ProbeFailed, ended

START_S = 60.0
"""Until a probe has started: ssh, an interpreter from a network disk."""
LOOK_S = 60.0


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
    facts: dict[Place, dict[str, Any]] = {}
    clocks: dict[Place, tuple[float, float]] = {}
    with ended(probes):
        for place in places:
            try:
                probes.append(Asked.at(place))
            except ProbeFailed as error:
                found.append(_no_probe(place, error))
        for probe in probes:
            try:
                probe.answer(START_S)
                before = time.time()
                there = float(probe.ask("clock", LOOK_S))
                after = time.time()
                clocks[probe.place] = (there - (before + after) / 2, (after - before) / 2)
                facts[probe.place] = probe.ask("facts", LOOK_S)
            except ProbeFailed as error:
                found.append(_no_probe(probe.place, error))
        answered = [probe for probe in probes if probe.place in facts]
        found += compare.compared(config, facts, clocks, has_input=has_input) if facts else []
        with ThreadPoolExecutor(max_workers=max(1, len(answered))) as pool:
            for each in pool.map(lambda probe: list(_place(config, probe, facts)), answered):
                found += each
        if len(answered) == len(places):
            found += links.examined(config, answered, wanted)
    return found, {str(place): its for place, its in facts.items()}


def _no_probe(place: Place, error: ProbeFailed) -> Finding:
    mend = f"see that `{place.command[0]} ...` works from this shell, with the same checkout and packages there"
    if place.is_here:
        mend = "--rollout-python names the interpreter of rollout servers; install slipstream-rl there"
    return stop("place", str(error), why="nothing of a run would start there", mend=mend, node=str(place))


def _place(config: Config, probe: Asked, facts: Mapping[Place, Mapping[str, Any]]) -> Iterator[Finding]:
    """One place by itself; what a node has once is looked at from its first place."""
    place = probe.place
    node = place.node if len({each.node for each in facts}) > 1 else ""
    its, modules = facts[place], machine.needed_kernels(config, place.role)
    looks: dict[str, Callable[[], Iterable[Finding]]] = {}
    if next(each for each in facts if each.node == place.node) is place:
        engines = machine.engines_on(config, place.node)
        (wanted,) = [most_devices(share) for share in config.shares if share.node == place.node]
        yield machine.shared_memory(config, sizes_of(config), its["shared_memory"], engines, node)
        yield machine.limits(its["open_files"], node)
        looks["gpu"] = lambda: machine.devices(config, probe.ask("devices", LOOK_S), wanted, node)
    if place.ports:
        asked = dict(place.ports)
        looks["port"] = lambda: machine.ports(asked, probe.ask("ports", LOOK_S, wanted=asked), str(place))
    if modules:
        looks["kernel"] = lambda: machine.kernels(
            probe.ask("kernels", LOOK_S, modules=modules), its["compiler"], str(place)
        )
    for code, look in looks.items():
        try:
            yield from look()
        except ProbeFailed as error:
            yield warn(code, f"could not be examined: {error}", node=str(place))
