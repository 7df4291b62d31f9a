"""Orders, rows and answers between the policy's ranks and ranks of another model.

They travel over one gloo group and lie in host memory: rows and logprobs are a few megabytes a step. Tensors are
written as safetensors, which runs no code when it is read. Every wait ends with the group's deadline; torchrun ends all
ranks when one of them dies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.checkpoint.api import CheckpointException


class Kind(IntEnum):
    """What the policy's ranks want next."""

    STOP = 0
    LOGPROBS = 1
    VALUES = 2
    TRAIN = 3
    REFRESH = 4
    DIGESTS = 5
    SAVE = 6
    LOAD = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One of them; the same on all ranks."""

    kind: Kind
    num_rows: int = 0
    """That each rank of the policy sends."""
    step: int = 0
    global_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One end.

    The rows of the policy's rank p are computed by rank p mod n of the n others.
    """

    group: dist.ProcessGroup
    policy: list[int]
    """Ranks of the policy in the world, rank 0 first."""
    others: list[int]
    """Ranks of the other model."""
    me: int

    def order(self, order: Order) -> None:
        """Of the policy's ranks. A collective with `next` of the others."""
        self._broadcast([order.kind, order.num_rows, order.step, order.global_tokens])

    def next(self) -> Order:
        """The next order, on a rank of the other model."""
        kind, num_rows, step, global_tokens = self._broadcast([0, 0, 0, 0])
        return Order(kind=Kind(kind), num_rows=num_rows, step=step, global_tokens=global_tokens)

    @property
    def partner(self) -> int:
        """Which of the others computes the rows of this rank of the policy."""
        return self.others[self.policy.index(self.me) % len(self.others)]

    @property
    def owners(self) -> list[int]:
        """Ranks of the policy whose rows this one of the others computes; perhaps none."""
        return self.policy[self.others.index(self.me) :: len(self.others)]

    @property
    def most_owners(self) -> int:
        """Of any of the others."""
        return -(-len(self.policy) // len(self.others))

    def send(self, tensors: dict[str, torch.Tensor], to: int) -> None:
        """Send named tensors to a rank of the world."""
        self.send_bytes(torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8), to)

    def receive(self, source: int) -> dict[str, torch.Tensor]:
        """What a rank of the world has sent."""
        tensors: dict[str, torch.Tensor] = load(self.receive_bytes(source).numpy().tobytes())
        return tensors

    def send_bytes(self, data: torch.Tensor, to: int) -> None:
        """Send a [n] uint8 tensor in host memory."""
        dist.send(torch.tensor([len(data)]), dst=to, group=self.group)
        dist.send(data, dst=to, group=self.group)

    def receive_bytes(self, source: int) -> torch.Tensor:
        """Receive what `send_bytes` has sent."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=source, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, src=source, group=self.group)
        return data

    @contextmanager
    def reported(self, done: str) -> Iterator[None]:
        """Errors inside are raised on the policy's ranks; this rank goes on."""
        problem = b""
        try:
            yield
        except (OSError, ValueError, KeyError, CheckpointException) as error:
            problem = f"it could not be {done} on rank {self.me}: {error}".encode()
        for rank in self.policy:
            self.send_bytes(torch.frombuffer(bytearray(problem or b" "), dtype=torch.uint8), rank)

    def problems(self) -> list[str]:
        """On the policy: what failed inside `reported` on the others."""
        said = [self.receive_bytes(rank).numpy().tobytes().decode() for rank in self.others]
        return [text for text in said if text.strip()]

    def _broadcast(self, numbers: list[int]) -> list[int]:
        message = torch.tensor(numbers)
        dist.broadcast(message, src=self.policy[0], group=self.group)
        return [int(number) for number in message]
