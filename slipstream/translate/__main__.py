"""`python -m slipstream.translate FILE`: a run of another framework as a configuration, line by line.

FILE is a YAML file of verl or AReaL, a bash script that starts verl or slime, the TOML file or files of prime-rl, or a
Python script around TRL's GRPOTrainer. Nothing of it is run. Every setting is printed with its key here, or why there
is none; what does not follow from the file or from a default of its framework (the split, the number of steps, another
optimizer's learning rate) is asked for with --set.
The configuration is checked, and written to a file that can be trained as it is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import BadOption, Contradiction
from configs.loading import ConfigError, parse
from learner import rules
from slipstream.runtime.program import program
from slipstream.translate.files import read
from slipstream.translate.settings import Undecided
from slipstream.translate.text import printed, yaml_file
from slipstream.translate.translation import translate


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 for a file that cannot be translated, or a configuration that cannot be."""
    parser = argparse.ArgumentParser(
        prog=program("slipstream.translate"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="of prime-rl several, one of the others")
    parser.add_argument("--out", type=Path, help="YAML file to write (default: from-FRAMEWORK.yaml)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a key of the result; repeatable")
    args = parser.parse_args(argv)
    try:
        found = translate(read(args.files), args.set)
        out = args.out or Path(f"from-{found.foreign.framework.lower()}.yaml")
        sys.stdout.write(printed(found) + "\n")
        if found.undecided:
            needed = "\n".join(f"  --set {key}=...  {why}" for key, why in found.undecided.items())
            raise Undecided(f"{', '.join(found.foreign.sources)}: decide what does not follow from it:\n{needed}")
        text = yaml_file(found)
        config = parse(text, str(out))
        for problem in rules.problems(config, rules.chosen(config)):
            raise Contradiction(f"{out}: {problem}")
        if out.exists() and not args.force:
            raise BadOption(f"--out {out}: is there already; name another file, or add --force")
        out.write_text(text, encoding="utf-8")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"slipstream: refused: {error}\n")
        return 2
    sys.stdout.write(f"{out}: written; slipstream train --config {out} --dry-run checks it on this machine\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
