"""One of two learner ranks on GPUs: `python learner_cuda_rank.py FOLDER`, with the environment of a rank.

What it sees goes to FOLDER/rank_R.json; tests/gpu/test_learner_cuda.py looks at it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import torch

from configs import Config
from learner.checkpoints.checkpointer import Checkpointer
from learner.ranks import Ranks, join_ranks
from tests.learner.tiny_models import built, make_config, saved
from tests.learner.two_ranks import CONDITIONED, sharded_gradients, steps
from weight_bus.digest import slice_digest

NUM_STEPS = 3


def configured(folder: Path, **learner: Any) -> Config:
    """The configuration of both ranks: bfloat16, otherwise the defaults of a GPU."""
    return make_config(
        folder / "model",
        replay={"async_lag": 2},
        placement={"device": "cuda", "split": "1:2"},
        learner={**CONDITIONED, "compute_dtype": "bfloat16", **learner},
        run={"dir": str(folder / "runs"), "name": "cuda"},
    )


def observe(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Gradients both ways, steps, digests, and a checkpoint that is loaded again."""
    config = configured(folder)
    policy, optimizer = built(config, ranks.mesh, ranks.device)
    seen: dict[str, Any] = {
        "device": str(ranks.device),
        "attention": policy.model.transformer.config._attn_implementation,
        "sharded": sharded_gradients(configured(folder, recompute="full"), ranks.mesh, ranks.device),
        "steps": steps(policy, optimizer, config, range(1, NUM_STEPS + 1)),
    }
    for dtype in ("float32", "bfloat16"):
        full = dict(policy.named_full_tensors(dtype))
        seen[f"digests_equal_{dtype}"] = policy.shard_digests(dtype) == {n: slice_digest(t) for n, t in full.items()}
    saved(Checkpointer(config, policy, optimizer), NUM_STEPS, replay={"cursor": 7} if ranks.is_first else {})
    seen["saved"] = policy.parameter_digest()
    fresh, fresh_optimizer = built(config, ranks.mesh, ranks.device)
    state = Checkpointer(config, fresh, fresh_optimizer).resume()
    seen["resumed"] = [fresh.parameter_digest(), fresh_optimizer.num_steps, (state or {}).get("step")]
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    with join_ranks(configured(folder)) as ranks:
        torch.manual_seed(0)
        seen = observe(folder, ranks)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main()
