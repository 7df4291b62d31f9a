"""The reference model of a KL term: frozen weights, no optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from configs import Config
from learner.policy.model import Policy, shaped_policy
from learner.policy.pretrained import PolicyError, fill
from learner.rows import Row
from slipstream.weight_files import weight_files


class Reference:
    """One rank's shard of the reference model. All ranks call it with as many rows."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Load algorithm.reference_path, or model.path, onto the policy's ranks. A collective. Raises PolicyError."""
        self.temperature = config.rollout.temperature
        with folder_of("algorithm.reference_path", config.algorithm.reference_path, config) as folder:
            self.model = shaped_policy(config, policy.mesh, policy.device, policy.budget, folder, is_frozen=True)
            fill(self.model.shards(), weight_files(folder, PolicyError), folder)

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row's tokens at the sampling temperature, in host memory. A collective."""
        return self.model.logprobs([row.by_own_router() for row in rows], self.temperature)

    def refresh(self, policy: Policy) -> None:
        """Become a copy of the policy, which is sharded over the same ranks."""
        for mine, new in zip(self.model.shards(), policy.shards(), strict=True):
            mine.local.copy_(new.local)


@contextmanager
def folder_of(key: str, path: str | None, config: Config) -> Iterator[Path]:
    """The folder that a key names, else model.path; errors of it name the key."""
    try:
        yield Path(path or config.model.path)
    except PolicyError as error:
        raise PolicyError(str(error).replace("model.path", key, 1) if path else str(error)) from error
