"""What several places must have alike, side by side: packages, environment, tokenizers, keys, clocks. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from configs.machine import NCCL_DEFAULTS
from configs.schema import Config
from slipstream.check.facts import SHOWN
from slipstream.check.finding import Finding, ok, stop, warn
from slipstream.check.places import Place

Facts = Mapping[Place, Mapping[str, Any]]
AGREED = tuple(NCCL_DEFAULTS)
"""The weight bus refuses a rollout server that has another value (weight_bus/transports/nccl.py)."""
OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "UCX_NET_DEVICES", "SGLANG_CPU_OMP_THREADS_BIND")
"""Variables that differ between machines and roles for good reason; so do those that end in _IFNAME or _HCA."""
SKEW_S = 1.0
SAME_TOKENS = ("tokenizer", "chat_template", "vocab_size", "eos_token_ids", "architecture")


def compared(
    config: Config, facts: Facts, clocks: Mapping[Place, tuple[float, float]], *, has_input: bool = True
) -> list[Finding]:
    """Everything that differs between places, and a line for each kind that does not."""
    return [
        *versions(config, facts),
        *environment(config, facts),
        *(models(facts) if has_input else ()),
        *keys(facts),
        *clock(clocks),
    ]


def _sides(values: Mapping[Place, str]) -> str:
    """`2.30.7 at learner of node0, 2.27.3 at rollout of node1`."""
    places: dict[str, list[str]] = {}
    for place, value in values.items():
        places.setdefault(value, []).append(str(place))
    return ", ".join(f"{value} at {' and '.join(there)}" for value, there in places.items())


def versions(config: Config, facts: Facts) -> Iterable[Finding]:
    """Side by side; what differs where both sides must be built alike."""
    found = []
    for place, its in facts.items():
        mend = "bash scripts/install.sh --venv .venv with the extra of that role"
        why = "kernels and APIs of another version have failed late, in the middle of a run"
        found += [warn("versions", pin, why=why, mend=mend, node=str(place)) for pin in its["pins"]]
    for name in SHOWN:
        present = {place: its["versions"][name] for place, its in facts.items() if name in its["versions"]}
        if len(set(present.values())) < 2:
            continue
        what, mend = f"{name} is {_sides(present)}", f"pip install the same {name} on both"
        if name == "nccl":
            why, mend = "the weight bus refuses a server whose NCCL differs", "install the same PyTorch on both"
            found.append((stop if config.weight_bus.on_gpus else warn)("versions", what, why=why, mend=mend))
        else:
            found.append(warn("versions", what, why="the two sides compute with different code", mend=mend))
    codes = {place: its["code"] for place, its in facts.items()}
    if len(set(codes.values())) > 1:
        what, mend = f"slipstream's own code is {_sides(codes)}", "install or check out the same release on all nodes"
        found.append(warn("versions", what, why="messages and protocols may differ", mend=mend))
    its = next(iter(facts.values()))
    shown = ", ".join(f"{name} {version}" for name, version in its["versions"].items())
    return found or [ok("versions", f"the same everywhere: python {its['python']}, {shown}")]


def environment(config: Config, facts: Facts) -> Iterable[Finding]:
    """Variables that libraries read when they connect, where places differ."""
    found = []
    for name in sorted({name for its in facts.values() for name in its["environment"]}):
        is_planned = any(name in place.planned for place in facts)
        if name in OWN or name.endswith(("_IFNAME", "_HCA")) or (name not in AGREED and is_planned):
            continue
        values = {place: str(its["environment"].get(name, "not set")) for place, its in facts.items()}
        if len(set(values.values())) < 2:
            continue
        wanted = next(value for value in values.values() if value != "not set")
        why, severe = "both ends of a connection read it when they connect", False
        if name in AGREED:
            why = "the first NCCL broadcast between two values fails with `invalid argument`, without a cause"
            wanted, severe = "0", config.weight_bus.backend == "nccl"  # what SGLang sets in its own processes
        mend = f"--set 'network.env={{{name}: \"{wanted}\"}}', or unset {name} in the shells of all nodes"
        found.append((stop if severe else warn)("environment", f"{name} is {_sides(values)}", why=why, mend=mend))
    return found or [ok("environment", "NCCL, UCX, CUDA and gloo read the same variables everywhere")]


def models(facts: Facts) -> Iterable[Finding]:
    """Model folder and tokenizer as each side reads them."""
    found = [stop("model", its["model"]["error"], node=str(p)) for p, its in facts.items() if "error" in its["model"]]
    readable = {place: its["model"] for place, its in facts.items() if "error" not in its["model"]}
    for name in SAME_TOKENS:
        values = {place: its[name] for place, its in readable.items()}
        if len(set(values.values())) > 1:
            code = "model" if name == "architecture" else "tokenizer"
            why = "token ids are all that travels: replay refuses a side that would read them differently"
            mend = f"copy one model folder to {' and '.join(place.node for place in readable)} (model.path)"
            found.append(stop(code, f"{name} differs: {_sides(values)}", why=why, mend=mend))
    if not found and readable:
        its = next(iter(readable.values()))
        found.append(ok("tokenizer", f"the same everywhere: {its['tokenizer']}, {its['vocab_size']} tokens"))
    return found


def keys(facts: Facts) -> Iterable[Finding]:
    """CURVE keys: one server key, and every client admitted by the first learner node."""
    held = {place: its["keys"] for place, its in facts.items() if its["keys"] is not None}
    found = [stop("keys", its["error"], node=str(place)) for place, its in held.items() if "error" in its]
    whole = {place: its for place, its in held.items() if "error" not in its}
    if len(whole) < 2:
        return found
    server = {place: its["server"][:8] for place, its in whole.items()}
    if len(set(server.values())) > 1:
        why = "a client with another server key is turned away in its handshake, again and again"
        mend = "copy server.key of the learner's node to network.keys of the others"
        found.append(stop("keys", f"server.key is {_sides(server)}", why=why, mend=mend))
    first = next(iter(whole.values()))
    for place, its in whole.items():
        if first["admits"] and its["client"] not in first["admits"]:
            mend = f"python -m replay.keys --out KEYS --export-node {its['name']} --to ..., and copy that folder there"
            what = f"the key {its['name']!r} of this node is not among those that the learner's node admits"
            found.append(stop("keys", what, mend=mend, node=str(place)))
    return found or [ok("keys", f"one server key, {len(first['admits'])} clients admitted")]


def clock(clocks: Mapping[Place, tuple[float, float]]) -> Iterable[Finding]:
    """Wall clocks against this machine's: (seconds ahead, uncertainty)."""
    why = "deadlines do not use it, but times in logs, metrics and traces cannot be compared"
    mend = "set it by NTP (timedatectl set-ntp true, or chronyc makestep)"
    found = []
    for place, (ahead, doubt) in clocks.items():
        if abs(ahead) - doubt > SKEW_S:
            what = f"the clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
            found.append(warn("clock", what, why=why, mend=mend, node=str(place)))
    return found or [ok("clock", f"within {SKEW_S:g} s on all machines")]
