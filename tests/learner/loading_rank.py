"""One of two gloo ranks that load a model: `python loading_rank.py RANK FOLDER`. Prints how its memory grew, as JSON.

FOLDER holds a store, `tiny` (loaded first, so that what loading needs once is not counted) and `large`.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
from one_rank import process_group
from tiny_models import make_config

from learner.model import build_policy

STATUS = Path("/proc/self/status")


def status_bytes(key: str) -> int:
    """A size in /proc/self/status: VmRSS is what is resident now, VmHWM the most that ever was."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    with process_group(folder / "store", rank, 2) as mesh:
        configs = [make_config(folder / name, placement={"split": "1:2"}) for name in ("tiny", "large")]
        build_policy(configs[0], mesh, torch.device("cpu"))
        before = status_bytes("VmRSS")
        policy = build_policy(configs[1], mesh, torch.device("cpu"))
        growth = status_bytes("VmHWM") - before
        held = sum(shard.local.numel() * shard.local.element_size() for shard in policy.shards())
        whole = sum(shard.numel * 4 for shard in policy.shards())
        digest = policy.parameter_digest()
    print(json.dumps({"growth": growth, "held": held, "whole": whole, "digest": digest}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
