"""`python -m tests.mutants`: takes away one guard of the product after the other; which test notices?

The tree stays as it is: mutants are made in a copy of it. The last line is JSON:

    {"mutants": 200, "caught": 198, "skipped": 2, "survived": []}

The exit code is 1 when one survives.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from tests.mutants import SKIPPED, Bench, Mutant, all_mutants, count


def tried(mutants: Iterator[Mutant], tests: Iterator[str]) -> list[tuple[str, str | None]]:
    """Of each mutant its name and what notices it, and first some of the tests without any; others take the rest.

    Raises SystemExit: a test fails without any mutant.
    """
    noticed = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, closing(Bench(Path(folder))) as bench:
        for arguments in tests:
            if (problem := bench.fails([arguments])) is not None:
                raise SystemExit(f"without any mutant: {problem}")
        for mutant in mutants:
            found = bench.notices(mutant)
            noticed.append((mutant.name, found))
            sys.stdout.write(f"{mutant.name}: {found or 'SURVIVED'}\n")
            sys.stdout.flush()
    return noticed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("packages", nargs="*", help="all of them, unless some are named")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--tested", action="store_true", help="all tests are known to pass without any mutant")
    args = parser.parse_args(arguments)
    every = all_mutants()
    chosen = [m for name in args.packages or every for m in every[name] if args.only in m.name]
    if stale := [mutant.name for mutant in chosen if count(mutant) != 1]:
        raise SystemExit(f"what these replace is not there once: {stale}")
    tests = iter(sorted({tests for mutant in chosen for tests in mutant.tests if not args.tested}))
    left = iter(chosen)
    with ThreadPoolExecutor(args.processes) as pool:
        noticed = [one for found in pool.map(lambda _: tried(left, tests), range(args.processes)) for one in found]
    survived, skipped = [name for name, by in noticed if by is None], sum(by == SKIPPED for _, by in noticed)
    caught = len(chosen) - len(survived) - skipped
    result = {"mutants": len(chosen), "caught": caught, "skipped": skipped, "survived": survived}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
