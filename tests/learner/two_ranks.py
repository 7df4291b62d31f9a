"""One of two gloo ranks: `RANK=R python two_ranks.py FOLDER`. Goes through everything that needs a second rank.

Imports cost seconds, so one pair of processes makes all observations and writes them to FOLDER/rank_R.json (weights:
safetensors, from rank 0); tests/learner/test_two_ranks.py looks at them. What a rank sees alone it asserts itself.
"""

import errno
import functools
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.checkpoints import checkpointer, export
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError, dcp_save
from learner.checkpoints.export import write_hf_folder
from learner.guards import Guards
from learner.layout import gathering
from learner.objective import Objective
from learner.optimizer import Optimizer
from learner.policy.memory import Budget
from learner.policy.model import Policy, build_policy
from learner.step import accumulate_gradients
from learner.trainer import Trainer
from slipstream.runtime import disk
from slipstream.runtime.lifeline import die_with_parent
from tests.learner import beside_ranks, mesh_ranks
from tests.learner.mesh_ranks import CONDITIONED as CONDITIONED
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.tiny_models import CPU, built, make_config, process_group, row_of, saved
from weight_bus.digest import combined, slice_digest

LORA = {"lora": {"rank": 3, "alpha": 6.0}}
NUM_STEPS = 5
SPAN_BYTES = 20_000
"""Makes several spans of a model."""
NUM_MICROBATCHES = 5
"""More than the second microbatch of some ranks can fill, so dummies meet full ones."""


def configured(folder: Path, name: str, **sections: Any) -> Config:
    """The configuration of both ranks."""
    base: dict[str, Any] = {
        "placement": {"split": "1:2"},
        "learner": CONDITIONED,
        "limits": {"nonfinite": "warn above 0, roll_back above 0"},
        "run": {"dir": str(folder / "runs"), "name": name},
    }
    return make_config(folder / name, **{**base, **sections})


steps = functools.partial(mesh_ranks.steps, microbatches=NUM_MICROBATCHES)


def memory(key: str) -> int:
    """A size in /proc/self/status in bytes: VmRSS is resident now, VmHWM the most that was since exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(dict(line.split(":", 1) for line in lines)[key].split()[0])


def loading(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """How memory grows with a model, after a tiny one, so that what loading needs once is not counted."""
    build_policy(configured(folder, "qwen3"), mesh, CPU)
    before = memory("VmRSS")
    shards = (policy := build_policy(configured(folder, "large"), mesh, CPU)).shards()
    return {
        "growth": memory("VmHWM") - before,
        "held": sum(shard.local.nbytes for shard in shards),
        "whole": sum(shard.numel * 4 for shard in shards),
        "names": [shard.name for shard in shards],
        "digest": policy.parameter_digest(),
    }


def layout_of(policy: Policy) -> dict[str, Any]:
    """Check gather, digests and layout of a policy, in both wire dtypes, against each other."""
    with torch.no_grad():
        policy.forward(row_of([[0, 0]]), 1.0)  # leaves gathered copies that must not be taken for shards
    for dtype in ("float32", "bfloat16"):
        full = dict(policy.named_full_tensors(dtype))
        assert policy.shard_digests(dtype) == {n: slice_digest(t) for n, t in full.items()}
        assert [(s.name, s.shape) for s in policy.shards()] == [(n, tuple(t.shape)) for n, t in full.items()]
        assert {t.dtype for t in full.values()} == {getattr(torch, dtype)}
    return {"parameter_digest": policy.parameter_digest(), "names": list(full)}


def sharded_gradients(config: Config, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Gradients of several microbatches, summed over ranks once a step and after each microbatch."""
    found, early = [], []
    for whole in (True, False):
        policy = build_policy(config, mesh, device, Budget("full", keeps_gathered=whole, whole_gradients=whole))
        batch = batch_of(random_step(1), 1, rank=policy.rank, world_size=2, num_microbatches=NUM_MICROBATCHES)
        rows, tokens = rows_of(batch, config)
        first = rows[0].to(device)
        policy.prepare_row(last=False)
        policy.forward(first, 1.0)[0].sum().backward()
        early.append(next(policy.named_parameters())[1].grad is not None)
        if not early[-1]:  # leave no whole gradients behind
            policy.prepare_row(last=True)
            policy.forward(first, 1.0)[0].sum().backward()
        objective = Objective(config.algorithm)
        sums = accumulate_gradients(policy, rows, objective, temperature=1.0, global_tokens=tokens)
        found.append((sums.metrics(), torch.cat([gradient.flatten() for gradient in policy.local_gradients()])))
    (once, gradients), (often, others) = found
    return {
        "early": early,
        "metrics_equal": once == often,
        "difference": float((gradients - others).abs().max()),
        "largest": float(gradients.abs().max()),
    }


def poisoned(policy: Policy, optimizer: Optimizer, config: Config) -> dict[str, Any]:
    """A weight that is not a number on rank 1 alone: both ranks must skip and decide alike, and nothing may change."""
    before = policy.parameter_digest()
    rows = policy.shards()[1].local[: policy.rank]
    kept = rows.clone()
    rows.fill_(float("nan"))
    trainer = Trainer(config, policy, optimizer, guards=Guards(config))
    update = trainer.train_step(batch_of(random_step(1), 1, rank=policy.rank, world_size=2))
    rows.copy_(kept)
    actions = [alarm.action for alarm in update.verdict.alarms]
    return {"reason": update.reason, "same": policy.parameter_digest() == before, "actions": actions}


def checkpoints(folder: Path, policy: Policy, optimizer: Optimizer, config: Config) -> dict[str, Any]:
    """Save while training goes on, load, go on again: the same digests. Then one rank's checkpoint, and failures."""
    seen: dict[str, Any] = {}
    keeper, gate = Checkpointer(config, policy, optimizer), Event()
    seen["nothing_yet"] = keeper.resume()
    seen["saved"] = policy.parameter_digest()
    with patch.object(checkpointer, "dcp_save", lambda *a, **k: gate.wait(60) and dcp_save(*a, **k)):
        keeper.start(NUM_STEPS, replay={"cursor": 7} if policy.rank == 0 else {}, digest=seen["saved"])
        steps(policy, optimizer, config, range(6, 8))  # a step that waited for the disk would wait for ever
        seen["meanwhile"] = [keeper.is_writing, keeper.settle(wait=False) is None]
        gate.set()
        report = keeper.settle(wait=True)
    assert report is not None and not keeper.is_writing
    seen["report"] = [report.step, report.kept, report.metrics]
    seen["went_on"] = policy.parameter_digest()
    fresh, fresh_optimizer = built(config, policy.mesh)
    seen["state"] = Checkpointer(config, fresh, fresh_optimizer).resume()
    seen["resumed"] = fresh.parameter_digest()
    steps(fresh, fresh_optimizer, config, range(6, 8))
    seen["went_on_again"] = fresh.parameter_digest()
    moved = folder / f"one_rank_{config.run.name}" / "checkpoints" / "step_2"
    Checkpointer(config, fresh, fresh_optimizer).load(moved)
    seen["from_one_rank"] = fresh.parameter_digest()
    seen["from_one_rank_steps"] = fresh_optimizer.num_steps
    blocked = make_config(policy.source, run={"dir": str(folder / "a_file"), "name": "x"})
    seen["blocked"] = refusal(Checkpointer(blocked, policy, optimizer))
    broken = make_config(policy.source, run={"dir": str(folder / "broken"), "name": "x"})
    full = make_config(policy.source, run={"dir": str(folder / "full"), "name": "x"})
    with patch.object(export, "FILE_BYTES", 50_000), patch.object(export, "save_file") as save:
        save.side_effect = OSError(errno.EIO, "Input/output error") if policy.rank == 1 else save_file
        seen["broken"] = refusal(Checkpointer(broken, policy, optimizer))
        no_room = iter([OSError(errno.ENOSPC, "No space left on device")] * policy.rank)
        save.side_effect = lambda *args, **named: raised(next(no_room, None)) or save_file(*args, **named)
        with patch.object(disk, "RETRY_S", 0.01):
            saved(Checkpointer(full, policy, optimizer), 1)
    return seen


def adapters(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """LoRA: five steps, a merged export by both ranks, and a checkpoint that comes back."""
    config = configured(folder, "qwen3", learner=CONDITIONED | LORA, run={"dir": str(folder / "runs"), "name": "lora"})
    policy, optimizer = built(config, mesh)
    start = policy.parameter_digest()
    steps(policy, optimizer, config, range(1, NUM_STEPS + 1))
    saved(Checkpointer(config, policy, optimizer), NUM_STEPS)
    fresh, fresh_optimizer = built(config, mesh)
    Checkpointer(config, fresh, fresh_optimizer).resume()
    return {"start": start, "end": policy.parameter_digest(), "resumed": fresh.parameter_digest()}


def raised(error: OSError | None) -> None:
    """Raise it, if there is one."""
    if error is not None:
        raise error


def refusal(keeper: Checkpointer) -> str:
    """Why a checkpoint cannot be written."""
    keeper.start(1, replay={})
    try:
        keeper.settle(wait=True)
    except CheckpointError as error:
        return str(error)
    return ""


def exported(folder: Path, policy: Policy) -> str:
    """Files of all ranks, with an index; the digest of what is in them."""
    with patch.object(export, "FILE_BYTES", 100_000):
        write_hf_folder(policy.layout, policy.shards(), policy.source, folder / "exported", "bfloat16", policy.group)
    return combined(policy.shard_digests("bfloat16"))


def on_other_ranks(folder: Path, rank: int) -> dict[str, Any]:
    """The checkpoint of two ranks goes on on one rank, and that one's on three."""
    gathering.GATHER_BYTES = SPAN_BYTES  # one of the ranks is a new process
    seen: dict[str, Any] = {}
    first = folder / "runs" / "qwen3" / "checkpoints" / f"step_{NUM_STEPS}"
    alone = configured(folder, "qwen3", run={"dir": str(folder / "runs"), "name": "alone"})
    if rank == 0:
        with process_group(folder / "one", 0, 1) as mesh:
            policy, optimizer = built(alone, mesh)
            Checkpointer(alone, policy, optimizer).load(first)
            seen["on_one"] = policy.parameter_digest()
            steps(policy, optimizer, alone, range(6, 8))
            saved(Checkpointer(alone, policy, optimizer), 7)
            save_file(dict(policy.named_full_tensors("float32")), folder / "one_at_7.safetensors")
    with process_group(folder / "three", rank, 3) as mesh:
        policy, optimizer = built(alone, mesh)
        seen["state"] = Checkpointer(alone, policy, optimizer).resume()
        seen["on_three"] = policy.parameter_digest()
        steps(policy, optimizer, alone, range(8, 10))
        full = dict(policy.named_full_tensors("float32"))
        if rank == 0:
            save_file(full, folder / "three_at_9.safetensors")
    return seen


def killed_while_writing(folder: Path) -> dict[str, Any]:
    """SIGKILL while a checkpoint is written and training goes on, each time at another point; then a resume."""
    return {point: killed_at(folder, point) for point in ("dcp_save", "write_hf_folder", "mark_complete", "rmtree")}


def killed_at(folder: Path, point: str) -> list[Any]:
    """What a process leaves that dies at the end of `point`, or where it begins to delete; and what a resume makes."""
    config = configured(folder, "qwen3", run={"dir": str(folder / "killed"), "name": point}, checkpoint={"keep": 1})
    checkpoints = Path(config.run_dir, "checkpoints")
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(parent)
        with process_group(folder / f"{point}_dies") as mesh:
            policy, optimizer = built(config, mesh)
            keeper = Checkpointer(config, policy, optimizer)
            saved(keeper, 1)
            place = shutil if point == "rmtree" else checkpointer
            real = getattr(place, point)

            def dies(*args: Any, **named: Any) -> None:
                if point != "rmtree":
                    real(*args, **named)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(place, point, dies)
            keeper.start(2, replay={})
            for step in itertools.count(2):
                steps(policy, optimizer, config, range(step, step + 1))
    _, status = os.waitpid(pid, 0)
    there = sorted(path.name for path in checkpoints.iterdir())
    if (pid := os.fork()) == 0:
        die_with_parent(parent)
        with process_group(folder / f"{point}_resumes") as mesh:
            state = Checkpointer(config, *built(config, mesh)).resume()
            (folder / f"{point}.json").write_text(json.dumps((state or {}).get("step")))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    left = sorted(path.name for path in checkpoints.iterdir())
    return [os.WTERMSIG(status), there, json.loads((folder / f"{point}.json").read_text()), left]


def fork(program: Callable[[], dict[str, Any]], result: Path) -> int:
    """Run it in a process of its own, without imports again; nothing of this one has been started yet."""
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(parent)
        result.write_text(json.dumps(program()))
        os._exit(0)
    return pid


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    programs = [lambda: on_other_ranks(folder, 2), lambda: killed_while_writing(folder)]
    child = fork(programs[rank], folder / f"rank_{rank}_child.json")
    seen: dict[str, Any] = {}
    with process_group(folder / "store", rank, 2) as mesh:
        seen["loading"] = loading(folder, mesh)
        gathering.GATHER_BYTES = SPAN_BYTES
        for name in ("qwen3", "llama"):
            config = configured(folder, name)
            policy, optimizer = built(config, mesh)
            seen[name] = {"start": layout_of(policy), "poisoned": poisoned(policy, optimizer, config)}
            seen[name]["steps"] = steps(policy, optimizer, config, range(1, NUM_STEPS + 1))
            full = dict(policy.named_full_tensors("float32"))
            if rank == 0:
                save_file(full, folder / f"{name}.safetensors")
            seen[name]["end"] = layout_of(policy)
            seen[name]["checkpoints"] = checkpoints(folder, policy, optimizer, config)
            changed = configured(folder, name, learner=CONDITIONED | {"recompute": "full"})
            seen[name]["sharded"] = sharded_gradients(changed, mesh, CPU)
        seen["lora"] = adapters(folder, mesh)
        seen["beside"] = beside_ranks.observe(folder, mesh)
        seen["meshes"] = mesh_ranks.everything(folder, 2)
        seen["exported"] = exported(folder, policy)
        # A collective after all failures: both ranks are still in step.
        seen["in_step"] = policy.parameter_digest()
    seen["on_other_ranks"] = on_other_ranks(folder, rank)
    assert os.waitpid(child, 0)[1] == 0
    seen["child"] = json.loads((folder / f"rank_{rank}_child.json").read_text())
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    # Threads of the backend may outlive the group and ask for the GIL of an interpreter that is going away, which
    # ends the process with SIGABRT once in a while. Everything is written, so leave without tearing down.
    os._exit(0)


if __name__ == "__main__":
    main()
