"""The weight bus of the simulation: a publisher that does the least that the protocol asks for, and a data plane.

Real Subscriptions talk to it. Weights are the number of a policy, so a flipped bit makes them those of nobody.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from replay.channel import Message
from tests.replay.simulation.network import Network
from weight_bus import messages as m
from weight_bus.errors import TransportError
from weight_bus.intake import Load
from weight_bus.manifest import plan

LAYOUT = plan([("w", "float32", (1,))], 1)
NOBODY = -1
"""Weights that no learner has made."""
PATIENCE = 30
"""Acts after which a subscriber that owes an answer is removed, and joins again."""


class Policy(NamedTuple):
    """Weights on the bus."""

    incarnation: int
    version: int
    digest: str


class SimulatedBus:
    """One learner's publisher; all of them are at one address."""

    def __init__(self, network: Network, rng: random.Random, faults: float) -> None:
        self.network, self.rng, self.faults = network, rng, faults
        self.published: Policy | None = None
        self.number, self.evaluate = 0, False
        """Of the published policy: its weights, and whether servers keep it for an evaluation."""
        self.epoch = 0
        self._offered: dict[tuple[str, int, int], str] = {}
        self._members: dict[str, dict[str, Any]] = {}

    def publish(self, policy: Policy, number: int, *, evaluate: bool) -> None:
        self.published, self.number, self.evaluate = policy, number, evaluate

    def hear(self, identity: str, message: Message) -> None:
        if self.published is None or not isinstance(message, m.InSession):
            return
        member, session = self._members.get(identity), message.session
        if isinstance(message, m.Join):
            self.epoch += 1
            self._members[identity] = {"session": session, "epoch": 0, "owes": 0, "holds": None, "waits": None}
            welcome = m.Welcome(session=session, incarnation=self.published.incarnation, version=0)
            self._say(identity, welcome)
            for each, known in self._members.items():
                self._say(each, m.Epoch(session=known["session"], epoch=self.epoch, members=[]))
        elif member is None or member["session"] != session:
            if isinstance(message, m.Heartbeat):
                self._say(identity, m.Removed(session=session, reason="nobody knows it", rejoin=True))
        elif isinstance(message, m.Goodbye):
            del self._members[identity]
        elif isinstance(message, m.EpochReady):
            member.update(epoch=message.epoch, owes=0, waits=None)
        elif isinstance(message, m.Staged) and not message.corrupt:
            self._commit(identity, message)
        elif isinstance(message, m.Staged | m.ReceiveFailed):
            member["owes"] = 0
        elif isinstance(message, m.Applied) and message.version == member["target"].version:
            member.update(owes=0, waits=None, holds=None if message.reason else member["target"])
        elif isinstance(message, m.Holding) and message.version == member["target"].version:
            member.update(owes=0, waits=message.stages)

    def act(self) -> None:
        for identity, member in list(self._members.items()):
            if member["owes"]:
                member["owes"] += 1
                if member["owes"] > PATIENCE:
                    del self._members[identity]
                    self._say(identity, m.Removed(session=member["session"], reason="slow", rejoin=True))
            elif member["epoch"] == self.epoch and member["holds"] != self.published and self._takes(member):
                self._begin(identity, member)

    def _takes(self, member: dict[str, Any]) -> bool:
        """Not while it waits for its engine, but for newer versions where it goes on staging."""
        return member["waits"] is None or (member["waits"] and member["target"] != self.published)

    def _begin(self, identity: str, member: dict[str, Any]) -> None:
        """Send what was published last; before it, now and then, what nobody may follow any more."""
        assert self.published is not None
        incarnation, version, digest = self.published
        begin = m.Begin(
            ranks={member["session"]: 1}, size=2, epoch=self.epoch, version=version, incarnation=incarnation,
            evaluate=self.evaluate, endpoint="", bucket_bytes=1, layout="w", digests=np.array([self.number]),
            digest=digest,
        )  # fmt: skip
        if self.rng.random() < self.faults:
            lost = replace(begin, digests=np.array([NOBODY]), digest="lost")
            strays = [replace(lost, epoch=self.epoch - 1), replace(lost, incarnation=incarnation - 1)]
            if member["holds"] is not None and version > 1:
                strays.append(replace(begin, version=version - 2, digest="older"))
            self._offer(identity, self.rng.choice(strays))
        member.update(owes=1, waits=None, target=self.published)
        self._offer(identity, begin)

    def _offer(self, identity: str, begin: m.Begin) -> None:
        (session,) = begin.ranks
        self._offered[session, begin.epoch, begin.version] = begin.digest
        self._say(identity, begin)

    def _commit(self, identity: str, staged: m.Staged) -> None:
        digest = self._offered[staged.session, staged.epoch, staged.version]
        commit = m.Commit(session=staged.session, epoch=staged.epoch, version=staged.version, digest=digest)
        if self.rng.random() < self.faults:
            self._say(identity, replace(commit, digest="another"))
        self._say(identity, commit)

    def _say(self, identity: str, message: Message) -> None:
        self.network.answer(identity, message)


class SimulatedIntake:
    """Implements `DataPlane`; with `faults` bits flip on the wire and broadcasts break off."""

    def __init__(self, rng: random.Random, faults: float) -> None:
        self.facts: dict[str, str] = {}
        self.rng, self.faults = rng, faults
        self.manifest: Any = None
        self.begun: Any = None
        """What was received last."""
        self.seconds = {"wire": 0.0, "verify": 0.0}

    def take(self, begin: m.Begin) -> list[str]:
        if self.rng.random() < self.faults:
            raise TransportError("a peer was lost", "closed")
        self.begun, (number,) = begin, begin.digests.tolist()
        self.manifest = SimpleNamespace(layout=LAYOUT, differences=lambda held: [] if held == {"w": number} else ["w"])
        return ["w"] if self.rng.random() < self.faults else []

    def apply(self, version: int, load: Load) -> Mapping[str, int]:
        return load(version, [])

    def forget(self) -> None:
        """There is no group to leave."""
