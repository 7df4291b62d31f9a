"""torchrun that dies with its parent: `python -m slipstream.launch.torchrun ... -m learner.train`."""

import os
import sys
from tempfile import TemporaryDirectory

from slipstream.runtime.lifeline import PARENT, die_with_parent

if __name__ == "__main__":
    # Before the long import of torch: a launcher that dies meanwhile must not leave this process behind.
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.run import main

    # torchrun would make a folder of its own for what ranks leave there when they fail, and never delete it
    with TemporaryDirectory(prefix="slipstream-torchrun-") as folder:
        sys.exit(main(["--log-dir", folder, *sys.argv[1:]]))
