"""`python -m slipstream.command.errors CODE`: what an error code means, what causes it and what mends it."""

import argparse
import sys
from collections.abc import Sequence

from configs.errors import did_you_mean
from configs.errors.catalogue import entries
from slipstream.runtime.program import program


def main(argv: Sequence[str] | None = None) -> int:
    """Print one code, or the list of all."""
    parser = argparse.ArgumentParser(prog=program("slipstream.command.errors"), description=__doc__)
    parser.add_argument("code", nargs="?", help="such as SLIP-BUS-03; without one, all codes are listed")
    wanted = parser.parse_args(argv).code
    known = {entry.code: entry for entry in entries()}
    if wanted is None:
        sys.stdout.writelines(f"{entry.code:18} {entry.symptom}\n" for entry in known.values())
        return 0
    code = wanted.strip("[] ").upper()
    if code not in known:
        hint = did_you_mean(code, known) or "without a code, all are listed"
        sys.stderr.write(f"{program('configs.errors')}: no code {wanted!r}; {hint}\n")
        return 2
    entry = known[code]
    sys.stdout.write(
        f"{entry.code} ({entry.name} in {entry.file})\n{entry.symptom}\nCause: {entry.cause}\nMend:  {entry.mend}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
