"""The time of nothing but the wire: a bare broadcast that the weight bus is held against.

Rank 0 broadcasts the same bytes in the same buckets, into memory that is there already, with no digest and no
message around it, one bucket right after the other. A time is that of the slowest rank, from a common start to the
end of its last bucket with the device synchronised. torchrun starts `-m scripts.bench.broadcast`.
"""

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs.machine import NCCL_DEFAULTS, visible_devices
from configs.schema import Config
from replay.channel.interfaces import bind_collectives
from scripts.bench.core import output_of
from scripts.chaos.report import conclude
from slipstream.runtime.lifeline import PARENT, die_with_parent

WARM_UP, REPEAT = 3, 12
TIMEOUT_S, LIMIT_S = 60.0, 90.0


def raw_broadcast(config: Config, num_bytes: int) -> dict[str, Any]:
    """The same bytes to as many receivers on the same devices. Raises CaseFailed."""
    share = config.shares[0]
    receivers = [engine[0] for engine in share.engines(config.placement.tensor_parallel)]
    environment = {**NCCL_DEFAULTS, **config.network.env, "OMP_NUM_THREADS": "1"}
    if config.weight_bus.backend != "gloo":
        visible = visible_devices(os.environ)
        chosen = [share.learner[0], *receivers]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in chosen)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(receivers) + 1}"]
    words += ["-m", "scripts.bench.broadcast", str(num_bytes), str(config.weight_bus.bucket_bytes)]
    words += [config.weight_bus.backend, config.network.host]
    said = output_of("the raw broadcast", words, LIMIT_S, **environment)
    return dict(json.loads([line for line in said.splitlines() if line.startswith("{")][-1]))


def device_time(device: torch.device) -> float:
    """When the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def largest(value: float, device: torch.device) -> float:
    """Of all ranks; also a barrier."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values.item())


def together(device: torch.device) -> float:
    """Begin together with all ranks, the device idle; the time then."""
    device_time(device)
    largest(0.0, device)
    return device_time(device)


def measure(num_bytes: int, bucket: int, device: torch.device) -> list[float]:
    """Seconds of REPEAT broadcasts of all buckets."""
    buckets = torch.zeros(num_bytes, dtype=torch.uint8, device=device).split(bucket)  # type: ignore[no-untyped-call]
    found = []
    for _ in range(WARM_UP + REPEAT):
        started = together(device)
        for one in buckets:
            dist.broadcast(one, 0)
        found.append(largest(device_time(device) - started, device))
    return found[WARM_UP:]


def main() -> None:
    """One rank (BYTES BUCKET BACKEND HOST); rank 0 prints one line of JSON."""
    num_bytes, bucket, backend, host = sys.argv[1:]
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    bind_collectives(os.environ, host)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    seconds = measure(int(num_bytes), int(bucket), device)
    if dist.get_rank() == 0:
        result = {"raw_s": statistics.median(seconds), "raw_min_s": min(seconds), "raw_max_s": max(seconds)}
        conclude(result | {"raw_receivers": dist.get_world_size() - 1, "raw_repeats": len(seconds)}, (), in_order=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
