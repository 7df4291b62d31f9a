"""Experts divided over ranks: `RANK=R WORLD_SIZE=N python moe_ranks.py FOLDER`, for test_moe_ranks.py."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from learner.policy.moe.exchange import Exchange
from learner.policy.moe.mixture import Mixture
from tests.learner.tiny_models import SIZES, process_group

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}


def layer() -> Mixture:
    """One with random weights, the same on every rank."""
    torch.manual_seed(0)
    made = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**{**SIZES, **EXPERTS}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    mixture = Mixture(made)
    mixture.left = torch.zeros(10)
    return mixture


def exchanged(mesh: DeviceMesh, tokens: list[int], given: list[int] | None) -> dict[str, float]:
    """Greatest differences of a divided layer from a whole one that has the tokens of all ranks.

    Args:
        tokens: of each rank.
        given: experts that all tokens go to, in place of the router's choice.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    whole, divided = layer(), layer()
    block = 8 // ranks
    for name, parameter in list(divided.experts.named_parameters()):
        own = parameter.detach()[rank * block : (rank + 1) * block].clone()
        setattr(divided.experts, name, torch.nn.Parameter(own))
    divided.exchange = Exchange(mesh)
    torch.manual_seed(1)
    hidden, upstream = torch.randn(2, sum(tokens), 64)
    first = sum(tokens[:rank])
    mine = slice(first, first + tokens[rank])
    everything, own = hidden.clone().requires_grad_(), hidden[mine].clone().requires_grad_()
    for mixture, one, target in ((whole, everything, upstream), (divided, own, upstream[mine])):
        if given is not None:
            mixture.given = torch.tensor([given]).expand(len(one), -1)
        made = mixture(one)
        (made * target).sum().backward()
        mixture.made = made.detach()
    gate = divided.gate.weight.grad
    dist.all_reduce(gate)  # the router is sharded with the rest of the layer, which adds up
    grads = [
        (p.grad[rank * block : (rank + 1) * block], q.grad)
        for p, q in zip(whole.experts.parameters(), divided.experts.parameters(), strict=True)
    ]
    pairs = {"out": (whole.made[mine], divided.made), "hidden": (everything.grad[mine], own.grad)}
    pairs |= {"router": (whole.gate.weight.grad, gate), "up": grads[0], "down": grads[1]}
    return {name: float((a - b).abs().max()) if a.numel() else 0.0 for name, (a, b) in pairs.items()}


def main() -> None:
    rank, world_size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    with process_group(folder / "store", rank, world_size) as mesh:
        seen = {
            "own": exchanged(mesh, [9, 4, 7, 1][:world_size], None),
            "all to the first rank": exchanged(mesh, [5, 3, 2, 2][:world_size], [1, 3, 0]),
        }
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main()
