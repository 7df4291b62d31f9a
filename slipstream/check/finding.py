"""What a check finds, and how findings are shown. No clock, no machine."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

Severity = Literal["stop", "warn", "ok"]
ORDER: tuple[Severity, ...] = ("stop", "warn", "ok")
INDENT = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Example: stop("port", "network.replay_port 5757 on 127.0.0.1 is taken", mend="take another port, or 0")
    """

    severity: Severity
    """`stop`: a run would not start, or would end."""
    code: str
    """Of the check, for programs. Example: "shared-memory"."""
    what: str
    """Names the key, file, node or peer, with the value that was found."""
    why: str = ""
    """Why it matters; empty where the first line says it."""
    mend: str = ""
    """The command or key that mends it; empty for `ok` and where `what` names it."""
    node: str = ""
    """Where it was found; empty for this machine."""

    @property
    def text(self) -> str:
        """Cause and remedy in one line."""
        place = f"{self.node}: " if self.node else ""
        return f"{place}{self.what}{f'; {self.mend}' if self.mend else ''}"

    @property
    def line(self) -> str:
        """The text after its code."""
        return f"{self.code}: {self.text}"


stop = partial(Finding, "stop")
warn = partial(Finding, "warn")
ok = partial(Finding, "ok")


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else as they were found."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def refused(code: str, error: Exception, why: str = "") -> Finding:
    """The finding of a refusal, whose message names cause and remedy."""
    first, _, rest = str(error).partition("\n")
    return stop(code, first, why=why or rest.replace("\n", "; "))


def report(findings: Sequence[Finding], width: int | None) -> list[tuple[Severity, str]]:
    """Lines with the severity that colours them: wrapped to `width` columns, or one line a finding for None."""
    lines: list[tuple[Severity, str]] = []
    for finding in in_order(findings):
        texts = [f"{finding.severity:<{INDENT}}{finding.line}"]
        texts += [" " * INDENT + f"why: {finding.why}"] if finding.why else []
        if width is not None:
            wrap = partial(textwrap.wrap, width=max(width, 30), subsequent_indent=" " * INDENT, break_on_hyphens=False)
            texts = [part for text in texts for part in wrap(text)]
        lines += [(finding.severity, text) for text in texts]
    return lines


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    errors, warnings, passed = (sum(finding.severity == severity for finding in findings) for severity in ORDER)
    said = "a run would stop" if errors else "a run can start"
    return f"{said}: {errors} errors, {warnings} warnings, {passed} passed"


def as_json(findings: Sequence[Finding], facts: object) -> str:
    """One object, for machines: findings by severity, counts, and the facts that they were made of."""
    found = in_order(findings)
    stops, warnings = (sum(finding.severity == severity for finding in found) for severity in ORDER[:2])
    listed = [asdict(finding) for finding in found]
    return json.dumps({"stops": stops, "warnings": warnings, "findings": listed, "facts": facts})
