"""Two processes of one program, or more, as ranks of a process group.

`python tests/support/ranks.py PROGRAM FOLDER` imports the program once and forks its ranks, whose environments are JSON
in RANK_PLACES: imports are most of what a rank costs.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def two_ranks(
    program: Path,
    folder: Path,
    place: Callable[[int], Mapping[str, str]],
    *,
    deadline_s: float,
    ranks: int = 2,
    forks: bool = True,
) -> list[dict[str, Any]]:
    """What `main` of PROGRAM wrote to FOLDER/rank_R.json, by rank.

    Args:
        place: the environment of one rank; while the program is imported, that of rank 0.
        forks: else each rank imports it in a process of its own.
    """
    places = [{"RANK": str(rank), **place(rank)} for rank in range(ranks)]
    started = []
    for of_one in [places] if forks else [[place] for place in places]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RANK_PLACES": json.dumps(of_one), **of_one[0]}
        command = [sys.executable, __file__, str(program), str(folder)]
        pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, env={**os.environ, **own}, **pipes))
    try:
        errors = [process.communicate(timeout=deadline_s)[1] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, said in zip(started, errors, strict=True):
        assert process.returncode == 0, said[-8000:]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def main(program: Path) -> None:
    """Be the only rank, or fork the ranks; ends with an error when one of them does."""
    places = json.loads(os.environ["RANK_PLACES"])
    sys.path[0], sys.argv = str(ROOT), sys.argv[1:]
    module = importlib.import_module(".".join(program.relative_to(ROOT).with_suffix("").parts))
    if len(places) == 1:  # also where what was imported has asked for GPUs, which forbids a fork
        os.environ.update(places[0])
        module.main()
        return
    gc.freeze()
    pids = []
    for place in places:
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(place)
            try:
                module.main()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the edge of the process: whatever it is, its output shows it
                traceback.print_exc()
            finally:
                os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"exit codes of the ranks: {codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
