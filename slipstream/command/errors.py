"""`python -m slipstream.command.errors CODE`: what an error code means, what causes it and what mends it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import did_you_mean
from configs.loading import read_yaml
from slipstream.runtime.program import program

TABLE: dict[str, dict[str, dict[str, str]]] = read_yaml(Path(__file__).with_suffix(".yaml").read_bytes())
"""By area and code: its `symptom`, `cause` and `mend`."""
CODES = {code: entry for area in TABLE.values() for code, entry in area.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one code, or the list of all."""
    parser = argparse.ArgumentParser(prog=program("slipstream.command.errors"), description=__doc__)
    parser.add_argument("code", nargs="?", help="such as SLIP-BUS-03; without one, all codes are listed")
    wanted = parser.parse_args(argv).code
    if wanted is None:
        sys.stdout.writelines(f"{code:18} {entry['symptom']}\n" for code, entry in CODES.items())
        return 0
    code = wanted.strip("[] ").upper()
    if code not in CODES:
        hint = did_you_mean(code, CODES) or "without a code, all are listed"
        sys.stderr.write(f"{program('slipstream.command.errors')}: no code {wanted!r}; {hint}\n")
        return 2
    entry = CODES[code]
    sys.stdout.write(f"{code}\n{entry['symptom']}\nCause: {entry['cause']}\nRemedy: {entry['mend']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
