"""`python -m rollout_server.tasks.sandbox`: says what programs can do on this machine; exit code 0 where nothing."""

import argparse
import sys

from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.probe import isolation
from slipstream.runtime.program import program


def main() -> int:
    """Entry point."""
    argparse.ArgumentParser(prog=program("rollout_server.tasks.sandbox"), description=__doc__).parse_args()
    try:
        found = isolation()
    except SandboxError as error:
        sys.stderr.write(f"programs cannot be run here: {error}\n")
        return 2
    sys.stdout.write(f"{found}\n")
    return 0 if found.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
