"""The value model: a language model with a scalar head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.beside.model import build_model, named
from learner.policy.memory import Budget
from learner.policy.meshes import Meshes
from learner.policy.model import Policy, TokenModel
from learner.policy.pretrained import fill, weight_files

HEAD = "lm_head.weight"
"""Name of the head's weights here; `score.weight` is what transformers calls those of a model with one label."""
SAVED_HEAD = "score.weight"


class ValueHead(torch.nn.Module):
    """One number from each hidden state, in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, device="meta"))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor]:
        """[n] float32 from [n, H]; what an output head is given besides is not used."""
        return (torch.mv(hidden.float(), self.weight.float()[0]),)


class ValueModel(TokenModel):
    """The root module: from a row to a value before each token in the loss."""

    def __init__(self, transformer: Any) -> None:
        super().__init__(transformer)
        transformer.lm_head = ValueHead(int(transformer.config.hidden_size))


def build_value_model(config: Config, mesh: DeviceMesh | Meshes, device: torch.device, budget: Budget) -> Policy:
    """Load critic.path, or model.path, onto the device, sharded over the mesh. A collective.

    The head is the folder's `score.weight`, or zeros: the first values are 0, and so advantages are rewards.

    Raises:
        PolicyError: the folder holds no model that the learner can train.
    """
    key = "model.path" if config.critic.path is None else "critic.path"
    folder = Path(config.critic.path or config.model.path)
    model = build_model(config, folder, mesh, device, budget, root=ValueModel, frozen=False, key=key)
    with named(key):
        files, shards = weight_files(folder), model.shards()
        (head,) = (shard for shard in shards if shard.name == HEAD)
        body = [shard for shard in shards if shard.name != HEAD]
        if SAVED_HEAD in files:
            body.append(replace(head, name=SAVED_HEAD))
        else:
            head.local.zero_()
        fill(body, files, folder)
    return model
