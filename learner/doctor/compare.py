"""What several places must have alike, side by side: packages, environment, tokenizers, keys, clocks. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from configs.plan import NCCL_DEFAULTS
from configs.schema import Config
from learner.doctor.facts import SHOWN
from learner.doctor.findings import Finding, Severity
from learner.doctor.places import Place

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


def _groups(values: Mapping[Place, str]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place, value in values.items():
        found.setdefault(value, []).append(place)
    return found


def _sides(values: Mapping[Place, str]) -> str:
    """`2.30.7 at learner of node0, 2.27.3 at rollout of node1`."""
    return ", ".join(f"{value} at {' and '.join(map(str, places))}" for value, places in _groups(values).items())


def versions(config: Config, facts: Facts) -> Iterable[Finding]:
    """Side by side; what differs where both sides must be built alike."""
    over_nccl = config.weight_bus.backend == "nccl"
    found = []
    for place, its in facts.items():
        for pin in its["pins"]:
            found.append(
                Finding(
                    "warn",
                    "versions",
                    pin,
                    why="kernels and APIs of another version have failed late, in the middle of a run",
                    mend="bash scripts/install.sh --venv .venv with the extra of that role",
                    node=str(place),
                )
            )
    for name in SHOWN:
        values = {place: its["versions"].get(name, "none") for place, its in facts.items()}
        present = {place: value for place, value in values.items() if value != "none"}
        if len(set(present.values())) < 2:
            continue
        severity: Severity = "stop" if name == "nccl" and over_nccl else "warn"
        why = {
            "nccl": "the weight bus refuses a rollout server whose NCCL differs from the learner's",
            "transformers": "tokens and templates are made by it on both sides",
        }.get(name, "the two sides compute with different code")
        mend = "install the same PyTorch on both" if name == "nccl" else f"pip install the same {name} on both"
        found.append(Finding(severity, "versions", f"{name} is {_sides(present)}", why=why, mend=mend))
    codes = {place: its["code"] for place, its in facts.items()}
    if len(set(codes.values())) > 1:
        what, mend = f"slipstream's own code is {_sides(codes)}", "install or check out the same release on all nodes"
        found.append(Finding("warn", "versions", what, why="messages and protocols may differ", mend=mend))
    if not found:
        found.append(Finding("ok", "versions", _one_line(next(iter(facts.values())))))
    return found


def _one_line(its: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in its["versions"].items())
    return f"the same everywhere: python {its['python']}, {shown}"


def environment(config: Config, facts: Facts) -> Iterable[Finding]:
    """Variables that libraries read when they connect, where places differ."""
    found = []
    names = sorted({name for its in facts.values() for name in its["environment"]})
    for name in names:
        if name in OWN or name.endswith(("_IFNAME", "_HCA")) or (name not in AGREED and _planned(name, facts)):
            continue
        values = {place: str(its["environment"].get(name, "not set")) for place, its in facts.items()}
        if len(set(values.values())) < 2:
            continue
        if name in AGREED:
            severity: Severity = "stop" if config.weight_bus.backend == "nccl" else "warn"
            why = "the first NCCL broadcast between two values fails with `invalid argument`, without a cause"
            wanted = "0"  # what SGLang sets in its own processes
        else:
            severity, why = "warn", "both ends of a connection read it when they connect"
            wanted = next(value for value in values.values() if value != "not set")
        mend = f"--set 'network.env={{{name}: \"{wanted}\"}}', or unset {name} in the shells of all nodes"
        found.append(Finding(severity, "environment", f"{name} is {_sides(values)}", why=why, mend=mend))
    return found or [Finding("ok", "environment", "NCCL, UCX, CUDA and gloo read the same variables everywhere")]


def _planned(name: str, facts: Facts) -> bool:
    return any(name in place.planned for place in facts)


def models(facts: Facts) -> Iterable[Finding]:
    """Model folder and tokenizer as each side reads them."""
    broken = {place: its["model"]["error"] for place, its in facts.items() if "error" in its["model"]}
    readable: dict[Place, Mapping[str, str]] = {p: its["model"] for p, its in facts.items() if p not in broken}
    found = [
        Finding("stop", "model", error, node=" and ".join(map(str, places)))
        for error, places in _groups(broken).items()
    ]
    for name in SAME_TOKENS:
        values = {place: its[name] for place, its in readable.items()}
        if len(set(values.values())) > 1:
            check = "model" if name == "architecture" else "tokenizer"
            why = "token ids are all that travels: replay refuses a side that would read them differently"
            mend = f"copy one model folder to {' and '.join(place.node for place in readable)} (model.path)"
            found.append(Finding("stop", check, f"{name} differs: {_sides(values)}", why=why, mend=mend))
    if not found and readable:
        its = next(iter(readable.values()))
        found.append(Finding("ok", "tokenizer", f"the same everywhere: {its['tokenizer']}, {its['vocab_size']} tokens"))
    return found


def keys(facts: Facts) -> Iterable[Finding]:
    """CURVE keys: one server key, and every client admitted by the first learner node."""
    held = {place: its["keys"] for place, its in facts.items() if its["keys"] is not None}
    found = [Finding("stop", "keys", its["error"], node=str(p)) for p, its in held.items() if "error" in its]
    whole = {place: its for place, its in held.items() if "error" not in its}
    if len(whole) < 2:
        return found
    server = {place: its["server"][:8] for place, its in whole.items()}
    if len(set(server.values())) > 1:
        found.append(
            Finding(
                "stop",
                "keys",
                f"server.key is {_sides(server)}",
                why="a client with another server key is turned away in its handshake, again and again",
                mend="copy server.key of the learner's node to network.keys of the others",
            )
        )
    first = next(iter(whole.values()))
    for place, its in whole.items():
        if first["admits"] and its["client"] not in first["admits"]:
            mend = f"python -m replay.keys --out KEYS --export-node {its['name']} --to ..., and copy that folder there"
            what = f"the key {its['name']!r} of this node is not among those that the learner's node admits"
            found.append(Finding("stop", "keys", what, mend=mend, node=str(place)))
    return found or [Finding("ok", "keys", f"one server key, {len(first['admits'])} clients admitted")]


def clock(clocks: Mapping[Place, tuple[float, float]]) -> Iterable[Finding]:
    """Wall clocks against this machine's: (seconds ahead, uncertainty)."""
    found = []
    for place, (ahead, doubt) in clocks.items():
        if abs(ahead) - doubt > SKEW_S:
            direction = "ahead of" if ahead > 0 else "behind"
            found.append(
                Finding(
                    "warn",
                    "clock",
                    f"the clock is {abs(ahead):.1f} s {direction} this machine's",
                    why="deadlines do not use it, but times in logs, metrics and traces cannot be compared",
                    mend="set it by NTP (timedatectl set-ntp true, or chronyc makestep)",
                    node=str(place),
                )
            )
    return found or [Finding("ok", "clock", f"within {SKEW_S:g} s on all machines")]
