"""One of two learner ranks over NCCL, of which the second is hit: `python collective_cuda_rank.py FOLDER FAULT`.

kill   SIGKILL        stop   SIGSTOP       late   the rank goes on, and begins no collective any more
cut    NCCL's own threads stand still, which move the bytes where ranks reach each other by sockets alone
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import torch
import torch.distributed as dist

from learner.collectives import watched
from learner.ranks import join_ranks
from learner.train import break_off
from slipstream.runtime import hang
from slipstream.runtime.lifeline import PARENT, die_with_parent, set_up_logging
from tests.learner.tiny_models import make_config

STEPS, HIT_AT, DEADLINE_S = 10_000, 20, 8.0
FREEZE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
frozen = []
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if open(f"/proc/{sys.argv[1]}/task/{thread}/comm").read().startswith("NCCL"):
        assert libc.ptrace(0x4206, int(thread), 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
        assert libc.ptrace(0x4207, int(thread), 0, 0) == 0, ctypes.get_errno()  # PTRACE_INTERRUPT
        frozen.append(thread)
print(f"frozen: {frozen}", flush=True)
time.sleep(120)
"""


def hit(fault: str) -> None:
    """What happens to this rank."""
    print(f"HIT {time.time()}", flush=True)
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":
            time.sleep(600)
        case "cut":
            helper = subprocess.Popen([sys.executable, "-c", FREEZE, str(os.getpid())], stdout=subprocess.PIPE)
            assert helper.stdout is not None
            print(helper.stdout.readline().decode(), flush=True)


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    config = make_config(
        folder,
        placement={"device": "cuda", "split": "1:2"},
        learner={"collective_deadline_s": DEADLINE_S},
        weight_bus={"deadline_s": 5.0, "collective_timeout_s": 2.0},
        run={"dir": str(folder), "name": "run"},
    )
    name = f"learner-{os.environ['RANK']}"
    set_up_logging(name, None)
    hang.begin(name, config.run_dir)
    with join_ranks(config) as ranks, watched(ranks.mesh, ranks.device, DEADLINE_S, break_off):
        values = torch.ones(16_000_000, device=ranks.device)
        for step in range(STEPS):
            dist.all_reduce(values)
            if step == HIT_AT and ranks.rank == 1:
                hit(fault)
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
