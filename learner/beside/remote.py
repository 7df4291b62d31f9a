"""Proxies of a reference model or a critic that has ranks of its own."""

from collections.abc import Sequence
from pathlib import Path

import torch

from learner.beside.line import Kind, Line, Order
from learner.beside.packets import pack
from learner.policy.model import Policy
from learner.rows import Row


class Remote:
    """What both have in common. Every method is a collective of the policy's ranks."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def save(self, folder: Path) -> None:
        """Have its state written. Raises ValueError: that failed on one of its ranks."""
        self._with_folder(Kind.SAVE, folder)

    def load(self, folder: Path) -> None:
        """Have its state read again. Raises ValueError: that failed on one of its ranks."""
        self._with_folder(Kind.LOAD, folder)

    def close(self) -> None:
        """Let its ranks end."""
        self._line.order(Order(kind=Kind.STOP))

    def _ask(self, kind: Kind, rows: Sequence[Row]) -> list[torch.Tensor]:
        self._line.order(Order(kind=kind, num_rows=len(rows)))
        self._line.send(pack(rows), self._line.partner)
        answer = self._line.receive(self._line.partner)
        return [answer[str(number)] for number in range(len(rows))]

    def _with_folder(self, kind: Kind, folder: Path) -> None:
        line = self._line
        line.order(Order(kind=kind))
        if line.me == line.policy[0]:
            for rank in line.others:
                line.send_bytes(torch.frombuffer(bytearray(str(folder).encode()), dtype=torch.uint8), rank)
        if problems := line.problems():
            raise ValueError("; ".join(problems))


class RemoteReference(Remote):
    """The reference model."""

    def __init__(self, line: Line, dtype: str) -> None:
        super().__init__(line)
        self._dtype = dtype

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, in host memory."""
        return self._ask(Kind.LOGPROBS, rows)

    def refresh(self, policy: Policy) -> None:
        """Send it the policy's weights, tensor by tensor."""
        self._line.order(Order(kind=Kind.REFRESH))
        for _, tensor in policy.named_full_tensors(self._dtype):
            if self._line.me == self._line.policy[0]:
                data = tensor.cpu().contiguous().flatten().view(torch.uint8)
                for rank in self._line.others:
                    self._line.send_bytes(data, rank)


class RemoteCritic(Remote):
    """The critic."""

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, in host memory."""
        return self._ask(Kind.VALUES, rows)

    def train(self, rows: Sequence[Row], *, step: int, global_tokens: int) -> dict[str, float]:
        """Have it learn the rows' returns; numbers for metrics.jsonl."""
        order = Order(kind=Kind.TRAIN, num_rows=len(rows), step=step, global_tokens=global_tokens)
        self._line.order(order)
        self._line.send(pack(rows), self._line.partner)
        return {name: float(value) for name, value in self._line.receive(self._line.others[0]).items()}

    def digests(self) -> dict[str, int]:
        """Of its float32 masters, by name."""
        self._line.order(Order(kind=Kind.DIGESTS))
        halves = self._line.receive(self._line.others[0])
        return {name: (int(high) << 32) + int(low) for name, (high, low) in halves.items()}
