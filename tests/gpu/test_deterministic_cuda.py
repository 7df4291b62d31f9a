"""A run on a GPU that is killed and resumed makes the same weights, step by step (learner.deterministic).

`python -m pytest tests/gpu/test_deterministic_cuda.py -s` needs one GPU and shows what it costs.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from configs.machine import DETERMINISTIC
from tests.gpu.test_learner_cuda import LARGER
from tests.learner.tiny_models import save_model
from tests.support.ranks import ROOT
from tests.support.runs import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
PROGRAM = Path(__file__).with_name("deterministic_rank.py")
STEPS, KILL_AT = 10, 7


def run(
    folder: Path, name: str, *, deterministic: bool = True, kill_at: int | None = None, ranks: int = 1, **learner: Any
) -> int:
    """Exit code of a learner, the same of all ranks; what it made is in FOLDER/NAME.txt."""
    settings = {"steps": STEPS, "kill_at": kill_at, "ranks": ranks}
    settings["learner"] = {"deterministic": deterministic, **learner}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(DETERMINISTIC if deterministic else {})}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(PROGRAM), str(folder), name, json.dumps(settings)]
    started = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
            cwd=folder,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=170)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = {process.returncode for process in started}
    assert codes in ({0}, {-9}), (codes, [text[-3000:] for text in said])
    return codes.pop()


def made(folder: Path, name: str) -> tuple[dict[int, list[str]], float]:
    """Digests of each step, each time that it was made, and the median seconds of a step after the first two."""
    rows = [line.split() for line in (folder / f"{name}.txt").read_text().splitlines()]
    digests: dict[int, list[str]] = {}
    for step, digest, _ in rows:
        digests.setdefault(int(step), []).append(digest)
    return digests, statistics.median(float(seconds) for _, _, seconds in rows[2:])


@pytest.mark.parametrize(
    "learner", [{}, {"attention": "sdpa"}, {"recompute": "selective"}, {"compute_dtype": "float32"}], ids=str
)
def test_a_killed_run_makes_the_same_weights_again(tmp_path: Path, learner: dict[str, Any]) -> None:
    save_model(tmp_path / "model", **LARGER)
    assert run(tmp_path, "straight", **learner) == 0
    assert run(tmp_path, "killed", kill_at=KILL_AT, **learner) == -9
    assert run(tmp_path, "killed", **learner) == 0
    straight, seconds = made(tmp_path, "straight")
    killed, _ = made(tmp_path, "killed")
    assert sorted(straight) == sorted(killed) == list(range(1, STEPS + 1))
    assert len(killed[KILL_AT]) == 2, "it was made twice, from the checkpoint of step 6 on"
    assert {step: set(found) for step, found in killed.items()} == {step: set(each) for step, each in straight.items()}
    assert len({digests[0] for digests in straight.values()}) == STEPS, "every step moved the weights"
    assert run(tmp_path, "free", deterministic=False, **learner) == 0
    free = made(tmp_path, "free")[1]
    print(f"\n{learner or 'defaults'}: {1000 * seconds:.1f} ms a step, {1000 * free:.1f} ms without: "
          f"{100 * (seconds / free - 1):+.1f} %")  # fmt: skip
