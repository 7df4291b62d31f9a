"""`python -m tests.replay.simulation.mutate`: takes away one guard of replay after the other; which test notices?

Each mutant (mutants.txt) is one exact replacement in a copy of the packages; the tree stays as it is. Some simulated
runs come first, then the fast tests of replay, then more runs. The last line is JSON:

    {"mutants": 60, "caught": 60, "survived": []}

The exit code is 1 when one survives.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
MUTANTS = Path(__file__).with_name("mutants.txt")
COPIED = ("configs", "learner", "replay", "weight_bus", "scripts", "tests/replay")
TESTS = ("test_service.py", "test_leases.py", "test_recovery.py", "test_line.py", "test_journal.py")
SEEDS = 300
FIRST_SEEDS = 60
"""Of them before the tests: what they miss, a test mostly finds faster than more seeds."""
LIMIT_S = 600.0
FINDING = r"^(?:(?:FAILED|ERROR) \S*::|(?:\S+\.)?(?=\w*(?:Violation|Error)\b))(\S.*)$"
"""The name of a failed test, or the last line of a traceback."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Whole lines of one file and what stands in their place."""

    name: str
    path: str
    old: str
    new: str


def read_mutants(text: str) -> list[Mutant]:
    """Of the file of mutants: `= name`, `@ path`, then lines with - and +."""
    mutants = []
    for block in re.split(r"^= ", text, flags=re.MULTILINE)[1:]:
        name, path, *lines = block.splitlines()
        old, new = ("".join(line[1:] + "\n" for line in lines if line.startswith(sign)) for sign in "-+")
        mutants.append(Mutant(name, path.removeprefix("@ "), old, new))
    return mutants


def copy(target: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


def change(root: Path, mutant: Mutant) -> str:
    """Apply a mutant; the source as it was.

    Raises:
        SystemExit: what it replaces is not there exactly once.
    """
    path = root / mutant.path
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        raise SystemExit(f"{MUTANTS}: what mutant {mutant.name!r} replaces is {count} times in {mutant.path}")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    return source


def caught_by(root: Path, seeds: int, processes: int) -> str | None:
    """What notices the change that was made under `root`; None when nothing does."""
    simulation = ["tests.replay.simulation", "--processes", str(processes), "--stop-at", "1"]
    first = min(seeds, FIRST_SEEDS)
    for arguments in (
        [*simulation, "--seeds", str(first)],
        ["pytest", "-x", "-q", "-p", "no:cacheprovider", *(str(root / "tests" / "replay" / name) for name in TESTS)],
        [*simulation, "--first", str(first), "--seeds", str(seeds - first)],
    ):
        code, output = run(root, ["-m", *arguments])
        if code != 0:
            found = re.findall(FINDING, output, re.MULTILINE)
            return f"{arguments[0]}: {found[-1][:150] if found else output[-150:]}"
    return None


def run(root: Path, arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a Python process whose packages are those under `root`; a hang counts as an error."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"TimeoutError: not done within {LIMIT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.simulation.mutate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="simulated runs for each mutant")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    args = parser.parse_args(arguments)
    chosen = [mutant for mutant in read_mutants(MUTANTS.read_text(encoding="utf-8")) if args.only in mutant.name]
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        copy(root)
        for mutant in chosen:  # all of them first: one that is out of date must not cost an hour
            (root / mutant.path).write_text(change(root, mutant), encoding="utf-8")
        if (problem := caught_by(root, args.processes * 25, args.processes)) is not None:
            raise SystemExit(f"without any mutant: {problem}")
        for mutant in chosen:
            source = change(root, mutant)
            found = caught_by(root, args.seeds, args.processes)
            (root / mutant.path).write_text(source, encoding="utf-8")
            survived += [mutant.name] if found is None else []
            sys.stdout.write(f"{mutant.name}: {found or 'SURVIVED'}\n")
            sys.stdout.flush()
    result = {"mutants": len(chosen), "caught": len(chosen) - len(survived), "survived": survived}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
