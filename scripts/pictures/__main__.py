"""`python -m scripts.pictures` writes docs/pictures/; `--check` fails where a file there is another one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.pictures.digests import digests
from scripts.pictures.overlap import overlap
from scripts.pictures.path import path
from scripts.pictures.processes import processes

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = {"path": path, "processes": processes, "overlap": overlap, "digests": digests}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every picture, or compare each with its file. 1 where one differs."""
    parser = argparse.ArgumentParser(prog="python -m scripts.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    others = []
    for name, draw in DRAWN.items():
        file, text = FOLDER / f"{name}.svg", draw().svg()
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            others.append(str(file))
    for each in others:
        print(f"{each} is not what `python -m scripts.pictures` draws", file=sys.stderr)
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
