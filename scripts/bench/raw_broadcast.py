"""`torchrun ... -m scripts.bench.raw_broadcast --bytes N --bucket B --backend nccl`: the time of nothing but the wire.

Rank 0 broadcasts the same bytes in the same buckets, into memory that is there already, with no digest and no
message around it, one bucket right after the other. What the weight bus takes is held against this. A time is that
of the slowest rank, from a common start to the end of its last bucket with the device synchronised.
"""

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from replay.channel.interfaces import bind_collectives
from replay.lifeline import PARENT, die_with_parent

WARM_UP = 3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest number of all ranks; also a barrier."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def measure(num_bytes: int, bucket: int, repeat: int, device: torch.device) -> list[float]:
    """Seconds of `repeat` broadcasts of all buckets."""
    sizes = [bucket] * (num_bytes // bucket) + ([num_bytes % bucket] if num_bytes % bucket else [])
    buckets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    seconds = []
    for _ in range(WARM_UP + repeat):
        synchronize(device)
        slowest(0.0, device)
        started = time.perf_counter()
        for one in buckets:
            dist.broadcast(one, 0)
        synchronize(device)
        seconds.append(slowest(time.perf_counter() - started, device))
    return seconds[WARM_UP:]


def main() -> int:
    """Entry point of one rank; rank 0 prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="torchrun -m scripts.bench.raw_broadcast", description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--bucket", type=int, required=True, help="bytes of one broadcast")
    parser.add_argument("--backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address of the interface to use")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    args = parser.parse_args()
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    bind_collectives(os.environ, args.host)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout_s))
    seconds = measure(args.bytes, args.bucket, args.repeat, device)
    if dist.get_rank() == 0:
        result = {
            "raw_s": statistics.median(seconds),
            "raw_min_s": min(seconds),
            "raw_max_s": max(seconds),
            "raw_receivers": dist.get_world_size() - 1,
            "raw_repeats": len(seconds),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
