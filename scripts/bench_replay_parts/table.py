"""The results as markdown."""

from collections.abc import Sequence
from typing import Any

HEAD = (
    "| case | M tokens / CPU-s | groups / CPU-s | main, ZeroMQ, other: µs of CPU / 1,000 tokens | B / token in, out,"
    " written | RSS MiB by quarter |"
)
MILLION = 1e6


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row a case; the case that holds its buffer stands below, in a line of its own."""
    lines = [HEAD, "|---|---|---|---|---|---|"]
    lines += [_row(result) for result in results if "memory_over_queued" not in result]
    for result in results:
        if "memory_over_queued" in result:
            lines += ["", _held(result)]
    return "\n".join(lines)


def _held(result: dict[str, Any]) -> str:
    empty, full, ratio = (result[key] for key in ("rss_mib_empty", "rss_mib_full", "memory_over_queued"))
    return (
        f"{result['groups']} groups of {result['queued_mib']} MiB in the buffer: resident memory {empty} → {full} MiB,"
        f" {ratio:.2f} × the bytes that came; then {result['producers']} idle producers cost"
        f" {result['idle_cpu_ms_per_second']:.0f} ms of CPU a second"
    )


def _row(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"| {result['case']} | {result['error']} | | | | |"
    parts = [result[f"cpu_seconds_{name}"] for name in ("main", "zmq_io", "other")]
    shares = ", ".join(f"{1e9 * part / result['tokens']:.0f}" for part in parts)
    sizes = ", ".join(f"{result[f'bytes_per_token_{name}']:.1f}" for name in ("in", "out", "written"))
    quarters = ", ".join(f"{value:.0f}" for value in result["rss_mib_by_quarter"])
    return (
        f"| {result['case']} | {result['tokens_per_cpu_second'] / MILLION:.2f} | {result['groups_per_cpu_second']:.0f}"
        f" | {shares} | {sizes} | {quarters} |"
    )
