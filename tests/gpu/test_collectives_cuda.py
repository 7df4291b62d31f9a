"""A learner rank is hit inside a collective over NCCL: it is named in time, with the flight recorder in the report.

`python -m pytest tests/gpu/test_collectives_cuda.py -s` needs two GPUs and prints what was said after how long.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from slipstream.runtime import ending
from tests.gpu.collective_cuda_rank import DEADLINE_S
from tests.support.ranks import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SET_THREAD_NAME": "1"}
SAID = {
    "kill": "rank 1 (pid",
    "stop": "rank 1 gave no answer",
    "late": "rank 1 has not begun it",
    "cut": "rank 1 gave no answer",  # torch asks NCCL's threads for what it dumps
}


@pytest.mark.parametrize("fault", SAID)
def test_the_rank_is_named_in_time(tmp_path: Path, fault: str) -> None:
    exit_file = tmp_path / "run" / "logs" / "learner.exit.json"
    exit_file.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "slipstream.launch.torchrun", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).with_name("collective_cuda_rank.py")), str(tmp_path), fault]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "PYTHONPATH": path, ending.PATH: str(exit_file), **(SOCKETS if fault == "cut" else {})}
    process = subprocess.Popen(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text = process.communicate(timeout=150)[0]
        ended = time.time()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    hit_at = float(text.split("HIT ")[1].split()[0])
    found = ending.read_file(exit_file)
    assert found is not None and found.failed, text[-3000:]
    print(f"\n{fault}: named after {found.unix_s - hit_at:.1f} s, ended after {ended - hit_at:.1f} s: {found.said}")
    assert SAID[fault] in found.said, text[-3000:]
    assert found.unix_s - hit_at < DEADLINE_S + 30
    if fault == "kill":
        return  # at once, by its exit status
    (report, *_) = sorted(tmp_path.glob("run/hang-*.txt"))
    print("\n".join(re.findall(r"(?:flight|rank \d:).*", report.read_text())))
    assert "flight recorder, by rank" in report.read_text() and "all_reduce no. " in report.read_text()
    assert found.error == "SLIP-LEARN-06" and found.symptom == "silent" and found.peers == ("learner-1",)
