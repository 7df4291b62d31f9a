"""The process of a teacher with a planted fault: `FAULT ORDINAL <arguments of rollout_server.teacher>`.

The faults are those of tests/e2e/faulty_rollout_server.py.
"""

import sys
from functools import partial

from rollout_server import teacher
from rollout_server.teachers import process
from tests.e2e.faulty_rollout_server import FaultySubscriber

process.WeightFollower = partial(process.WeightFollower, subscriber=FaultySubscriber)

if __name__ == "__main__":
    sys.exit(teacher.main())
