"""Between the first learner node and every other place: replay's port with its keys, and groups of the weight bus.

The test groups are formed, used and left by the transports of the weight bus themselves, in the environment that the
real processes get, a pair of places at a time. Every wait has a deadline.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence

from configs.schema import Config
from slipstream.check.finding import Finding, ok, stop, warn
from slipstream.check.places import ProbeFailed, RunningProbe
from slipstream.check.probe import CONNECT_S, REFUSAL_S

ORDER_S = 15.0
IMPORT_S = 90.0
"""The first group of a probe imports torch, and CUDA starts."""
SHARED_GPU = "nothing, where it is one GPU that both share: NCCL refuses that, and such a run takes gloo"
FORMS = 4
"""Collective timeouts that forming a group may take (weight_bus/transports/base.py)."""
MEND = {
    "gloo": "open all ports between the nodes, and name the interface: --set network.host, or GLOO_SOCKET_IFNAME in"
    " network.env",
    "nccl": "NCCL_DEBUG=INFO in network.env says where it waits; NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 and"
    " NCCL_P2P_DISABLE=1 are the usual switches",
    "ucc": "UCX_NET_DEVICES in network.env; docs/weight-bus.md, or --set weight_bus.backend=gloo",
}


def backends(config: Config) -> list[str]:
    """The backend of the weight bus first; gloo always, because learner ranks and fallbacks use it."""
    return [medium for medium in dict.fromkeys([config.weight_bus.medium, "gloo"]) if medium in MEND]


def examined(config: Config, probes: Sequence[RunningProbe], wanted: Sequence[str]) -> Iterator[Finding]:
    """All links, from the first place on.

    Args:
        config: of the run.
        probes: at the places; the first one is replay's and rank 0's.
        wanted: backends to test.
    """
    first, others = probes[0], probes[1:]
    if not others:
        return
    try:
        address = str(first.ask("listen", ORDER_S, port=0))
    except ProbeFailed as error:
        mend = "correct network.host and network.keys of that node"
        yield stop("link", f"replay could not listen: {error}", mend=mend, node=str(first.place))
        return
    reached = []
    for probe in others:
        found = control(probe, address)
        yield found
        if found.severity == "ok":
            reached.append(probe)
    for backend in wanted:
        for probe in reached:
            yield group(config, backend, first, probe)


def control(probe: RunningProbe, address: str) -> Finding:
    """A connection to replay's node, with keys where the run has some."""
    try:
        found: Mapping[str, str] = probe.ask(
            "reach", CONNECT_S + REFUSAL_S + ORDER_S, address=address, timeout_s=CONNECT_S
        )
        problem = found.get("problem", "")
    except ProbeFailed as error:
        problem = str(error)
    if not problem:
        return ok("link", f"replay's node answers at {address}", node=str(probe.place))
    mend = "open the port in the firewall, or correct network.host and the host file"
    mend = "" if "network.keys" in problem else mend
    return stop("link", problem, why="leases, groups and orders of the bus go there", mend=mend, node=str(probe.place))


def group(config: Config, backend: str, first: RunningProbe, other: RunningProbe) -> Finding:
    """A group of two: formed, one broadcast proven, left."""
    code, between = f"{backend}-group", f"{first.place} and {other.place}"
    limit = IMPORT_S + (FORMS + 2) * config.weight_bus.collective_timeout_s
    prefix = f"doctor/{secrets.token_hex(8)}"
    try:
        other.ask("prepare", limit, backend=backend)  # the first one's wait does not include the other one's imports
        endpoint = first.ask("open_group", limit, backend=backend)
        for rank, probe in enumerate((first, other)):
            probe.send("group", backend=backend, rank=rank, endpoint=endpoint, prefix=prefix)
        root, member = _both(first, other, limit)
    except ProbeFailed as error:
        is_needed = backend == config.weight_bus.medium
        why = "learner ranks of several nodes, and a bus without GPUs, use it"
        why = "no version of the weights would reach this rollout server" if is_needed else why
        mend = SHARED_GPU if backend == "nccl" and config.engines_share_gpus else MEND[backend]
        return (stop if is_needed else warn)(code, f"between {between}: {error}", why=why, mend=mend)
    if not member["intact"]:
        mend = "look for faults of memory and cables (dmesg, ibstat)"
        return stop(code, f"between {between}: the bytes that arrived are others", mend=mend)
    seconds = min(root["form_s"], member["form_s"])  # the other one waited for a peer that was still starting
    return ok(code, f"between {between}: formed in {seconds:.2f} s, a broadcast arrived whole")


def _both(first: RunningProbe, other: RunningProbe, limit_s: float) -> list[Mapping[str, float]]:
    """Answers of both; the second one is taken even where the first failed, so that orders and answers stay in step."""
    failures, answers = [], []
    for probe in (first, other):
        try:
            answers.append(probe.answer(limit_s))
        except ProbeFailed as error:
            failures.append(f"{probe.place}: {error}")
    if failures:
        raise ProbeFailed("; ".join(failures))
    return answers
