"""A learner rank is hit inside a collective over NCCL: it is named in time, with the flight recorder in the report.

`python -m pytest tests/gpu/test_collectives_cuda.py -s` needs two GPUs and prints what was said after how long.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from slipstream.launch.learner.ranks import RankGroup, cause
from slipstream.runtime import ending
from slipstream.runtime.ending import Ending
from tests.gpu.collective_cuda_rank import DEADLINE_S
from tests.support.ranks import ROOT
from tests.support.waiting import until

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
    command = [sys.executable, str(Path(__file__).with_name("collective_cuda_rank.py")), str(tmp_path), fault]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    place = {"WORLD_SIZE": "2", "PYTHONPATH": path, **(SOCKETS if fault == "cut" else {})}
    places = [(f"learner-{rank}", {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    logs = tmp_path / "run" / "logs"
    group = RankGroup.start(1, command, places, logs)

    def noted() -> Ending | None:
        group.note_failures()
        return cause(ending.of_ranks(logs))

    try:
        until(noted, "an end that is noted", 150)
        found = noted()
    finally:
        group.end()
    text = (logs / "learner-1.log").read_text()
    hit_at = float(text.split("HIT ")[1].split()[0])
    assert found is not None and found.failed, text[-3000:]
    print(f"\n{fault}: named after {found.unix_s - hit_at:.1f} s: {found.said}")
    assert SAID[fault] in found.said, text[-3000:]
    assert found.unix_s - hit_at < DEADLINE_S + 30
    if fault == "kill":
        return  # at once, by its exit status
    (report, *_) = sorted(tmp_path.glob("run/hang-*.txt"))
    print("\n".join(re.findall(r"(?:flight|rank \d:).*", report.read_text())))
    assert "flight recorder, by rank" in report.read_text() and "all_reduce no. " in report.read_text()
    assert found.error == "SLIP-LEARN-06" and found.symptom == "silent" and found.peers == ("learner-1",)
