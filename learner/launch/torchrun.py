"""torchrun that dies with its parent: `python -m learner.launch.torchrun --nproc-per-node 2 -m learner.train ...`."""

import os
import sys

from replay.lifeline import PARENT, die_with_parent

if __name__ == "__main__":
    # Before the long import of torch: a launcher that dies meanwhile must not leave this process behind.
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.run import main

    sys.exit(main())
