"""Mutants of each package: small changes of the product, every one of which some test must notice.

A file for each package: a mutant is `= name`, `@ path`, any number of `! tests`, then whole lines that are replaced (-)
by others (+). `! tests` are arguments of pytest, or `simulation N` for N simulated runs of replay, and are tried in
order; those before the first mutant count for mutants that name none. `python -m tests.mutants` runs them.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
COPIED = ("configs", "examples", "learner", "replay", "rollout_server", "scripts", "slipstream", "tests", "weight_bus")
FAILED = 1
"""Exit code of pytest, and of the simulation, when a test fails; others say that nothing was tested."""
FINDING = r"^(?:(?:FAILED|ERROR) \S*::|(?:\S+\.)?(?=\w*(?:Violation|Error)\b))(\S.*)$"
"""The name of a failed test, or the last line of a traceback."""
SKIPPED = "skipped"
"""What notices a mutant whose tests are not for this machine."""
ALL_SKIPPED = r"^\d+ skipped\b"
"""How pytest sums up what has no other outcome."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Whole lines of one file, what stands in their place, and the tests that shall notice it."""

    name: str
    path: str
    tests: tuple[str, ...]
    old: str
    new: str


def read_mutants(text: str) -> list[Mutant]:
    """Of a file of mutants."""
    head, *blocks = re.split(r"^= ", text, flags=re.MULTILINE)
    defaults = _marked(head.splitlines(), "! ")
    mutants = []
    for block in blocks:
        name, *lines = block.splitlines()
        (path,) = _marked(lines, "@ ")
        old, new = ("".join(line + "\n" for line in _marked(lines, sign)) for sign in "-+")
        mutants.append(Mutant(name, path, tuple(_marked(lines, "! ") or defaults), old, new))
    return mutants


def _marked(lines: Sequence[str], mark: str) -> list[str]:
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def all_mutants() -> dict[str, list[Mutant]]:
    """By package."""
    files = sorted(Path(__file__).parent.glob("*.txt"))
    return {file.stem: read_mutants(file.read_text(encoding="utf-8")) for file in files}


def count(mutant: Mutant) -> int:
    """How often what it replaces is there; once, where it is up to date."""
    path = ROOT / mutant.path
    return path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0


class Bench:
    """A copy of the packages and their tests, and a process that runs these (tests/mutants/worker.py)."""

    def __init__(self, root: Path) -> None:
        self.root, self._all_skipped = root, False
        ignored = shutil.ignore_patterns("__pycache__", "*.gz", "*.png")
        for name in COPIED:
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", root)
        environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(root / "tests" / "mutants" / "worker.py")]
        self._worker = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def notices(self, mutant: Mutant) -> str | None:
        """What notices a mutant, or that its tests are not for this machine; None when nothing does.

        Raises RuntimeError: its tests cannot be run.
        """
        path = self.root / mutant.path
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            return self.fails(mutant.tests) or (SKIPPED if self._all_skipped else None)
        finally:
            path.write_text(source, encoding="utf-8")

    def fails(self, tests: Sequence[str]) -> str | None:
        """What fails first of these tests; None when nothing does."""
        self._all_skipped = True
        for arguments in tests:
            words = shlex.split(arguments)
            if words[0] == "simulation":
                command = ["tests.replay.simulation", "--processes", "1", "--stop-at", "1", "--seeds", words[1]]
            else:
                command = ["pytest", "-x", "-p", "no:cacheprovider", *words]
            code, output = self._run(command)
            found = re.findall(FINDING, output, re.MULTILINE)
            self._all_skipped &= re.search(ALL_SKIPPED, output, re.MULTILINE) is not None
            if code == FAILED:
                return f"{arguments}: {found[-1][:120] if found else output[-120:]}"
            if code != 0:
                raise RuntimeError(f"{arguments} ended with {code}: {output[-2000:]}")
        return None

    def _run(self, command: list[str]) -> tuple[int, str]:
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(json.dumps(command) + "\n")
        self._worker.stdin.flush()
        code, output = json.loads(self._worker.stdout.readline())
        return code, output

    def cpu_s(self) -> float:
        """Seconds that all tests have taken so far."""
        used = psutil.Process(self._worker.pid).cpu_times()
        return float(used.user + used.system + used.children_user + used.children_system)

    def close(self) -> None:
        self._worker.communicate()
