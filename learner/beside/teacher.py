"""A teacher inside the learner's ranks: its whole vocabulary is compared with the policy's, so nothing else has room.

Its layers are sharded over the ranks as a reference model is. Its output head is whole on each: policy and teacher make
logits of one chunk of tokens at a time side by side, forward and backward, and a head that is gathered for each would
cost a collective of its size every time.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from configs import Config
from learner.beside.reference import folder_of
from learner.distillation import build_distillation
from learner.layout import DTYPES
from learner.policy.model import Policy, TokenModel, shaped_policy
from learner.policy.pretrained import PolicyError, fill, read_config
from learner.rows import Row
from learner.teacher_view import TeacherView
from slipstream.families.record import EMBEDDING, HEAD
from slipstream.families.sizes import Sizes
from slipstream.weight_files import weight_files


class Hidden(torch.nn.Module):
    """In the place of an output head: what one would be given."""

    def forward(self, hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor]:
        """[n, H]"""
        return (hidden,)


class HeadlessModel(TokenModel):
    """The root module: from a row to hidden states of its tokens."""

    def __init__(self, transformer: Any) -> None:
        super().__init__(transformer)
        transformer.lm_head = Hidden()


class Teacher:
    """One rank's part of the one teacher that sits in the learner."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Load its folder onto the policy's ranks. A collective. Raises PolicyError."""
        ((name, teacher),) = config.teachers.items()
        dtype, chosen = DTYPES[config.learner.compute_dtype], build_distillation(config.algorithm)
        assert chosen is not None
        with folder_of(f"teachers.{name}.path", teacher.path, config) as folder:
            place = policy.mesh, policy.device, policy.budget
            self.model = shaped_policy(config, *place, folder, HeadlessModel, is_frozen=True)
            files = weight_files(folder, PolicyError)
            fill(self.model.shards(), files, folder)
            sizes = Sizes.of(self.model.model.transformer.config.to_dict())
            self.head = read_head(files, folder).to(policy.device, dtype)
        self.direction = chosen.options["direction"]
        self.temperature = config.rollout.temperature / sizes.family.logits(sizes.keys)
        self.softcap = sizes.keys.get(sizes.family.caps[1])

    @torch.no_grad()
    def show(self, row: Row) -> Row:
        """The row, which is on the device, with the teacher's view of it. A collective."""
        (hidden,) = self.model.forward(row.by_own_router(), self.temperature)
        self.model.clear_gradients()  # there are none, but the root module holds what it has gathered until then
        view = TeacherView(hidden, self.head, self.temperature, self.softcap, self.direction)
        return replace(row, teacher_view=view)


def read_head(files: Mapping[str, Path], folder: Path) -> torch.Tensor:
    """[V, H] of a folder, in its own dtype. Raises PolicyError."""
    name = EMBEDDING if read_config(folder).tie_word_embeddings else HEAD
    if name not in files:
        raise PolicyError(f"model.path: {folder} has no tensor {name!r}, which its config.json asks for")
    try:
        with safe_open(files[name], framework="pt") as opened:
            head: torch.Tensor = opened.get_tensor(name)
    except SafetensorError as error:
        raise PolicyError(f"model.path: {files[name]} is not readable: {error}") from error
    return head
