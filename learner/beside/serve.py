"""A rank of the reference model or the critic: does what the policy's ranks order.

consumes     rows of the policy's ranks (learner/beside/line.py)
produces     logprobs, values, updates of the critic
waits for    the next order, for at most three times learner.batch_deadline_s, twice checkpoint.deadline_s, and
             evaluation.deadline_s
unblocked by learner/trainer.py (a step), learner/learner.py (digests, checkpoints, the end)
"""

import logging
from pathlib import Path
from typing import Generic, TypeVar

import torch

from configs.schema import Config
from learner.beside.critic import Critic
from learner.beside.folders import check_folders
from learner.beside.line import Kind, Line, Order
from learner.beside.model import own_budget
from learner.beside.packets import empty_row, unpack
from learner.beside.reference import Reference
from learner.policy.memory import OutOfMemory
from learner.ranks import Ranks, join_ranks
from learner.rows import Row

log = logging.getLogger(__name__)
Part = TypeVar("Part", bound=Reference | Critic)


def serve(config: Config) -> None:
    """Serve as one rank of the role that the placement gives this process. Raises OutOfMemory."""
    check_folders(config)
    with join_ranks(config) as ranks:
        server = server_of(config, ranks)
        num = len(server.line.policy)
        log.info("%s rank %d of %d serves %d learner ranks", ranks.role, ranks.rank, ranks.world_size, num)
        try:
            server.run()
        except RuntimeError as error:
            if said := server.model.model.when_exhausted(error, config):
                raise OutOfMemory(said) from error
            raise


def server_of(config: Config, ranks: Ranks) -> "ReferenceServer | CriticServer":
    """The server of this rank's role, its model loaded. A collective."""
    if ranks.role == "critic":
        budget = own_budget(config, config.critic.path or config.model.path, ranks.mesh, ranks.device)
        return CriticServer(ranks.lines["critic"], Critic(config, ranks.mesh, ranks.device, budget))
    folder = config.algorithm.reference_path or config.model.path
    budget = own_budget(config, folder, ranks.mesh, ranks.device)
    return ReferenceServer(ranks.lines["reference"], Reference(config, ranks.mesh, ranks.device, budget))


class Server(Generic[Part]):
    """What both do with rows and folders."""

    def __init__(self, line: Line, model: Part) -> None:
        self.line = line
        self.model = model

    def run(self) -> None:
        """Until the policy's ranks stop."""
        while (order := self.line.next()).kind != Kind.STOP:
            self.answer(order)

    def answer(self, order: Order) -> None:
        """Carry out one order."""
        match order.kind:
            case Kind.SAVE | Kind.LOAD:
                folder = Path(self.line.receive_bytes(self.line.policy[0]).numpy().tobytes().decode())
                with self.line.reported("written" if order.kind == Kind.SAVE else "loaded"):
                    (self.model.save if order.kind == Kind.SAVE else self.model.load)(folder)
            case _:
                raise ValueError(f"{self.model.NAME} ranks do not know the order {order.kind.name}")

    def rows(self, order: Order) -> list[Row]:
        """Those of all owners, and empty ones: all ranks of the role have as many."""
        packets = [self.line.receive(owner) for owner in self.line.owners]
        found = [row for packet in packets for row in unpack(packet, order.num_rows)]
        return found + [empty_row()] * (order.num_rows * self.line.most_owners - len(found))

    def give_back(self, found: list[torch.Tensor], num_rows: int) -> None:
        """Each owner what belongs to its rows."""
        for number, owner in enumerate(self.line.owners):
            own = found[number * num_rows : (number + 1) * num_rows]
            self.line.send({str(i): tensor for i, tensor in enumerate(own)}, owner)


class ReferenceServer(Server[Reference]):
    """Of a rank of the reference model."""

    def answer(self, order: Order) -> None:
        match order.kind:
            case Kind.LOGPROBS:
                self.give_back(self.model.logprobs(self.rows(order)), order.num_rows)
            case Kind.REFRESH:
                for shard in self.model.model.shards():
                    data = self.line.receive_bytes(self.line.policy[0])
                    whole = data.view(shard.local.dtype).view(shard.shape)
                    shard.local.copy_(whole[shard.first_row : shard.first_row + len(shard.local)])
            case _:
                super().answer(order)


class CriticServer(Server[Critic]):
    """Of a rank of the critic."""

    def answer(self, order: Order) -> None:
        match order.kind:
            case Kind.VALUES:
                self.give_back(self.model.values(self.rows(order)), order.num_rows)
            case Kind.TRAIN:
                values = self.model.train(self.rows(order), step=order.step, global_tokens=order.global_tokens)
                self._tell({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})
            case Kind.DIGESTS:
                found = self.model.digests()
                self._tell({name: torch.tensor([digest >> 32, digest & 0xFFFFFFFF]) for name, digest in found.items()})
            case _:
                super().answer(order)

    def _tell(self, tensors: dict[str, torch.Tensor]) -> None:
        """The first rank of the role says it to every rank of the policy."""
        if self.line.me == self.line.others[0]:
            for rank in self.line.policy:
                self.line.send(tensors, rank)
