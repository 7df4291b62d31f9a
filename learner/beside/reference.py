"""The reference model of a KL term: frozen weights, no optimizer; with LoRA the policy's own, and adapters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from configs import Config
from learner.checkpoints.parts import Part
from learner.layout import Shard
from learner.policy import lora
from learner.policy.model import Policy, shaped_policy
from learner.policy.pretrained import PolicyError, fill
from learner.rows import Row
from slipstream.weight_files import weight_files


class Reference:
    """One rank's shard of the reference model. All ranks call it with as many rows."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Load algorithm.reference_path, or model.path, onto the policy's ranks. A collective. Raises PolicyError."""
        self.temperature = config.loss_temperature
        with folder_of("algorithm.reference_path", config.algorithm.reference_path, config) as folder:
            self.model = shaped_policy(config, policy.mesh, policy.device, policy.budget, folder, is_frozen=True)
            fill(self.model.shards(), weight_files(folder, PolicyError), folder)
        self.part = Part(self.model)

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row's tokens at the sampling temperature, in host memory. A collective."""
        return self.model.logprobs(rows, self.temperature)

    def refresh(self, policy: Policy) -> None:
        """Become a copy of the policy, which is sharded over the same ranks."""
        news: Iterable[Shard] = policy.shards()
        if policy.lora is not None:
            news = lora.merged(policy.layout, policy.frozen(), news, policy.lora, policy.meshes.replica)
        for mine, new in zip(self.model.shards(), news, strict=True):
            mine.local.copy_(new.local)


class AdapterReference:
    """The policy's frozen weights with other adapters: at first those of a new run, which add nothing."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """`policy` is as build_policy made it."""
        self.temperature, self._policy = config.loss_temperature, policy
        self.part = Part(policy, held=_copied(policy))

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """As those of Reference: from the policy itself, while it has the other adapters. A collective."""
        own = _copied(self._policy)
        self._put(self.part.weights())
        try:
            return self._policy.logprobs([row.by_own_router() for row in rows], self.temperature)
        finally:
            self._put(own)

    def refresh(self, policy: Policy) -> None:
        """Take the policy's adapters."""
        for name, new in policy.local_parameters().items():
            self.part.weights()[name].copy_(new)

    def _put(self, adapters: Mapping[str, torch.Tensor]) -> None:
        for name, local in self._policy.local_parameters().items():
            local.copy_(adapters[name])


def _copied(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: local.clone() for name, local in policy.local_parameters().items()}


@contextmanager
def folder_of(key: str, path: str | None, config: Config) -> Iterator[Path]:
    """The folder that a key names, else model.path; errors of it name the key."""
    try:
        yield Path(path or config.model.path)
    except PolicyError as error:
        raise PolicyError(str(error).replace("model.path", key, 1) if path else str(error)) from error
