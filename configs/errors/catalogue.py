"""All codes, read from the sources: no torch is needed, and no package that an error speaks of."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "replay", "weight_bus", "rollout_server", "learner", "scripts", "examples")
AREAS = {
    "CONFIG": "Configuration",
    "DATA": "Prompts",
    "MODEL": "Model folders",
    "KEYS": "CURVE keys",
    "NET": "Between processes",
    "RUN": "The whole run",
    "JOURNAL": "The journal",
    "BUS": "The weight bus",
    "ENGINE": "Engines",
    "TASK": "Prompts at a rollout server",
    "REWARD": "Rewards",
    "ENV": "Environments and agents",
    "CODE": "Code of yours",
    "SANDBOX": "The sandbox",
    "LEARN": "The learner",
    "GUARD": "Guards",
    "CKPT": "Checkpoints",
    "REPORT": "Reports",
    "TRL": "TRL's trainer",
    "DOCTOR": "Doctor",
    "MAKE": "Examples",
    "BENCH": "Benchmarks",
}
HEAD = """# Errors

<!-- Written by scripts/pages.py from the classes; do not edit. -->

Each error has a code, which stands in brackets at the end of the first line of its message: in logs, in the last line
of a process and in the events that the launcher shows. `slipstream explain` with a code prints what stands here.
The class in brackets before it, such as `[silent]`, says [what kind of failure](../howto/hang.md) it looks like.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One code. Example: Entry("SLIP-BUS-03", "NotAvailable", "weight_bus/errors.py", symptom, cause, mend)."""

    code: str
    name: str
    file: str
    symptom: str
    cause: str
    mend: str

    @property
    def area(self) -> str:
        """The middle of the code."""
        return self.code.split("-")[1]


def entries() -> list[Entry]:
    """All codes of the sources, by area and number."""
    order = list(AREAS)
    return sorted(_entries(), key=lambda entry: (order.index(entry.area), entry.code))


def _entries() -> Iterator[Entry]:
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if 'code="SLIP-' not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and any(keyword.arg == "code" for keyword in node.keywords):
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                symptom = paragraph.split(". ")[0].rstrip(".") + "."
                file = str(path.relative_to(ROOT))
                yield Entry(given["code"], node.name, file, symptom, given["cause"], given["mend"])


def page() -> str:
    """docs/reference/errors.md."""
    parts, area = [HEAD], ""
    for entry in entries():
        if entry.area != area:
            area = entry.area
            parts.append(f"## {AREAS[area]}\n")
        parts.append(
            f"### {entry.code}\n\n**{entry.symptom}** (`{entry.name}`)\n\n"
            f"- *Cause:* {entry.cause}\n- *Mend:* {entry.mend}\n"
        )
    return "\n".join(parts)
