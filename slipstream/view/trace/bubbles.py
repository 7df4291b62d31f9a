"""What a trace says in a few lines: shares of the window by process, and the longest bubble."""

from collections.abc import Sequence

from slipstream.view.trace.merge import STEP
from slipstream.view.trace.sources import TORCH, Span, TraceProcess

WAIT = "wait_batch"
PHASES = (WAIT, "update_actor", "publish_wait", "param_sync")
GPU = f"{TORCH}GPU"


def summary(processes: Sequence[TraceProcess], steps: range) -> str:
    """One line a process, and one about the longest wait of the first rank."""
    first = next(process for process in processes if process.name == "learner-0")
    spans = first.lanes["steps"].spans
    whole = [span for span in spans if STEP.fullmatch(span.name)]
    begin, end = min(span.start for span in whole), max(span.end for span in whole)
    width = max(len(process.name) for process in processes) + 2
    lines = [f"steps {steps[0]} to {steps[-1]}: {(end - begin) / 1e9:.3f} s"]
    lines += [f"{process.name:{width}}{_shares(process, begin, end)}" for process in processes]
    waits = [span for span in spans if span.name == WAIT]
    if waits:
        longest = max(waits, key=lambda span: span.end - span.start)
        lines.append(f"longest bubble: {_bubble(longest, whole, processes)}")
    return "\n".join(lines)


def _shares(process: TraceProcess, begin: int, end: int) -> str:
    lanes = {name: lane.spans for name, lane in process.lanes.items()}
    found: list[tuple[str, int]] = []
    if process.role == "learner":
        of_phase = {phase: [span for span in lanes.get("steps", []) if span.name == phase] for phase in PHASES}
        of_phase |= {name.removeprefix(TORCH): spans for name, spans in lanes.items() if name.startswith(GPU)}
        found = [(name, _covered(spans, begin, end)) for name, spans in of_phase.items()]
    elif process.role == "replay":
        found = [("busy loop", _covered(lanes.get("loop", []), begin, end))]
    else:
        states = lanes.get("state", [])
        for state in dict.fromkeys(str(span.args.get("state")) for span in states):
            found.append((state, _covered([s for s in states if s.args.get("state") == state], begin, end)))
        paused = [span for span in lanes.get("weights", []) if span.name == "paused"]
        found += [("engine paused", _covered(paused, begin, end))] if paused else []
    return "  ".join(f"{name} {share / (end - begin):.0%}" for name, share in found)


def _covered(spans: Sequence[Span], begin: int, end: int) -> int:
    """Ns of the window in which at least one of the spans lies."""
    total, reached = 0, begin
    for span in sorted(spans, key=lambda span: span.start):
        start, stop = max(span.start, reached), min(span.end, end)
        if stop > start:
            total, reached = total + stop - start, stop
    return total


def _bubble(wait: Span, steps: Sequence[Span], processes: Sequence[TraceProcess]) -> str:
    """A wait of the learner, and what each rollout server did for most of it."""
    step = next((s.name for s in steps if s.start <= wait.start and wait.end <= s.end), "a step")
    doing = []
    for process in processes:
        states = process.lanes["state"].spans if "state" in process.lanes else []
        inside = [(min(s.end, wait.end) - max(s.start, wait.start), str(s.args.get("state"))) for s in states]
        if inside and max(inside)[0] > 0:
            doing.append(f"{process.name}: {max(inside)[1]}")
    meanwhile = f", while {', '.join(doing[:8])}" if doing else ""
    return f"learner-0 waits {(wait.end - wait.start) / 1e9:.3f} s for the batch of {step}{meanwhile}"
