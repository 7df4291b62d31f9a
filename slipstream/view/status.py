"""`slipstream status RUN_DIR`: one line that says how a run stands: what it waits for, or how it has ended.

Exit code 0: it goes on or has finished, 1: it has failed or its replay does not answer, 2: there is no run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.loading import ConfigError
from replay.channel import ChannelError
from slipstream.runtime.ending import read
from slipstream.runtime.program import program
from slipstream.view.live_text import waiting_text
from slipstream.view.top import Folder


def line(folder: Folder) -> tuple[str, bool]:
    """What a person asks first, and whether all is well. Raises ChannelError: replay refuses the keys of this node."""
    status = folder.status()
    if status is not None:
        return f"version {status['version']}: {waiting_text(status)}", not status.get("ended")
    ending = read(folder.path)
    return (folder.silence, False) if ending is None else (ending.said, not ending.failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.status"), description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder, such as runs/quickstart")
    try:
        said, is_well = line(Folder(parser.parse_args(argv).run_dir))
    except (ConfigError, ChannelError) as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    sys.stdout.write(said + "\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
