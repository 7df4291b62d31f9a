"""torchrun that dies with its parent: `python -m learner.launch.torchrun --nproc-per-node 2 -m learner.train ...`."""

import os
import sys

from torch.distributed.run import main

from replay.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    sys.exit(main())
