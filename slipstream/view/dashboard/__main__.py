"""`python -m slipstream.view.dashboard runs/x [runs/y]`: a page about a run, or about two side by side.

Reads the run folders alone, live or afterwards, and writes nothing into them. It listens on the loopback interface
only, and every request needs the token of the URL that is printed.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError
from slipstream.runtime.program import program
from slipstream.view.dashboard.run import RunReader
from slipstream.view.dashboard.server import Dashboard


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; exit code 2 for a folder that is no run, or a port that is taken."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.dashboard"), description=__doc__)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="one run folder, or two to compare")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 takes a free one (default)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    if len(args.run_dirs) > 2:
        sys.stderr.write(f"slipstream: {len(args.run_dirs)} run folders given; name one, or two to compare\n")
        return 2
    try:
        runs = [RunReader(Path(folder)) for folder in args.run_dirs]
        dashboard = Dashboard(runs, args.port)
    except ConfigError as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"slipstream: --port {args.port}: {error.strerror}; take another one, or 0 for a free one\n")
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    sys.stdout.write(f"slipstream: dashboard at {dashboard.url}  (Ctrl-C ends it)\n")
    sys.stdout.flush()
    try:
        dashboard.serve()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        dashboard.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
