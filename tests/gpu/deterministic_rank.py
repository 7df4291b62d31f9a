"""A learner that may be killed: `python deterministic_rank.py FOLDER NAME SETTINGS`, SETTINGS as JSON.

    {"steps": 10, "kill_at": 7, "learner": {"deterministic": true}}

Trains random steps from the newest checkpoint of run NAME, saves every third one, appends `step digest seconds` to
FOLDER/NAME.txt after each, and ends itself by SIGKILL after step `kill_at`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import torch

from learner.checkpoints.checkpointer import Checkpointer
from learner.guards import Guards
from learner.ranks import join_ranks
from learner.trainer import Trainer
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import built, make_config, saved

GROUPS = 16


def main() -> None:
    folder, name, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    config = make_config(
        folder / "model",
        replay={"async_lag": 2},
        placement={"device": settings.get("device", "cuda"), "split": f"1:{settings.get('ranks', 1)}"},
        learner={"max_tokens_per_microbatch": 4096, **settings["learner"]},
        limits={"max_logprob_diff": 1e3, "max_logprob_diff_16bit": 1e3},
        run={"dir": str(folder / "runs"), "name": name},
    )
    with join_ranks(config) as ranks:
        policy, optimizer = built(config, ranks.mesh, ranks.device)
        keeper, guards = Checkpointer(config, policy, optimizer), Guards(config)
        trainer = Trainer(config, policy, optimizer, guards=guards)
        state = keeper.resume()
        if state is not None:
            guards.restore(state["guards"])
        for step in range(int(state["step"]) + 1 if state else 1, settings["steps"] + 1):
            started = time.perf_counter()
            drawn = random_step(step, num_groups=GROUPS, vocab=1000)
            place = {"rank": ranks.rank, "world_size": ranks.world_size}
            trainer.train_step(batch_of(drawn, step, num_microbatches=3, **place))
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            digest = policy.parameter_digest()
            if ranks.is_first:
                with (folder / f"{name}.txt").open("a") as file:
                    file.write(f"{step} {digest} {seconds}\n")
            if step % 3 == 0:
                saved(keeper, step, guards=guards.state())
            if step == settings.get("kill_at"):
                torch.distributed.barrier()  # its digest is written
                os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
