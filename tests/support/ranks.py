"""Two processes of one program, or more, as ranks of a process group."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def two_ranks(
    program: Path, folder: Path, place: Callable[[int], Mapping[str, str]], *, deadline_s: float, ranks: int = 2
) -> list[dict[str, Any]]:
    """What `python PROGRAM FOLDER` wrote to FOLDER/rank_R.json, for `size` ranks; `place` is the environment of one."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "learner")))
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RANK": str(rank), **place(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=deadline_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}:\n{errors[rank][-4000:]}"
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
