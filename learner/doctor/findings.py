"""What an examination finds, one line a check, and how it is shown. No clock, no machine."""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["stop", "warn", "ok"]
ORDER: tuple[Severity, ...] = ("stop", "warn", "ok")
INDENT = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Example: Finding("stop", "port", "network.replay_port 5757 on 127.0.0.1 is taken", mend="take another port, or 0")
    """

    severity: Severity
    """`stop`: a run would not start, or would end."""
    check: str
    what: str
    """Names the key, file, node or peer, with the value that was found."""
    why: str = ""
    """Why it matters; empty where the first line says it."""
    mend: str = ""
    """The command or key that mends it; empty for `ok`."""
    node: str = ""
    """Where it was found; empty for this machine."""

    @property
    def line(self) -> str:
        """Cause and remedy in one line."""
        place = f"{self.node}: " if self.node else ""
        return f"{self.check}: {place}{self.what}{f'; {self.mend}' if self.mend else ''}"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else as they were found."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def refused(check: str, error: Exception, why: str = "") -> Finding:
    """The finding of a refusal, whose message names cause and remedy."""
    first, _, rest = str(error).partition("\n")
    return Finding("stop", check, first, why=why or rest.replace("\n", "; "))


def gathered(check: str, examine: Callable[[], object], *, refusals: tuple[type[Exception], ...], ok: str) -> Finding:
    """What a check of the start says: it raises one of `refusals`, or all is well."""
    try:
        examine()
    except refusals as error:
        return refused(check, error)
    return Finding("ok", check, ok)


def report(findings: Sequence[Finding], width: int | None) -> list[tuple[Severity, str]]:
    """Lines with the severity that colours them: wrapped to `width` columns, or one line a finding for None."""
    lines: list[tuple[Severity, str]] = []
    for finding in in_order(findings):
        texts = [f"{finding.severity:<{INDENT}}{finding.line}"]
        if finding.why:
            texts.append(" " * INDENT + f"why: {finding.why}")
        for text in texts:
            if width is None:
                lines.append((finding.severity, text))
                continue
            wrapped = textwrap.wrap(
                text, max(width, 30), subsequent_indent=" " * INDENT, break_long_words=True, break_on_hyphens=False
            )
            lines += [(finding.severity, part) for part in wrapped]
    return lines


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ORDER}
    said = "a run would stop" if counts["stop"] else "a run can start"
    return f"{said}: {counts['stop']} to mend, {counts['warn']} to look at, {counts['ok']} in order"


def as_json(findings: Sequence[Finding], facts: object) -> str:
    """One object, for machines: findings by severity, counts, and the facts that they were made of."""
    found = in_order(findings)
    return json.dumps(
        {
            "stops": sum(finding.severity == "stop" for finding in found),
            "warnings": sum(finding.severity == "warn" for finding in found),
            "findings": [asdict(finding) for finding in found],
            "facts": facts,
        }
    )


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something would stop the run, 0 with warnings."""
    return int(any(finding.severity == "stop" for finding in findings))
