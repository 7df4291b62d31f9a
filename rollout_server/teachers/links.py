"""Connections of a rollout server to processes of teachers: where they are, who is asked, and what comes back."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from replay.channel import AsyncDealer, ChannelError, Keys, WireError
from replay.channel.fields import shown
from replay.messages import ADDRESS
from rollout_server.engines.base import Scored
from rollout_server.teachers import NotScored
from rollout_server.teachers.messages import FROM_TEACHER, Refusal, Score, Scores

log = logging.getLogger(__name__)

LOOK_S = 1.0
LISTED_S = 0.2
"""Until replay has listed a new version of a teacher."""


class OtherVersion(NotScored):
    """A teacher was refreshed while it was asked: its answer, or replay's list, is of before."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process of a teacher, as replay lists it."""

    teacher: str
    address: str
    version: int
    digest: str


class Link:
    """One connection; answers find their requests by number."""

    def __init__(self, place: Place, identity: str, run_id: str, keys: Keys | None, limit: int) -> None:
        self.place = place
        address, _, key = place.address.partition(" ")
        own = replace(keys, server_public=key.encode()) if keys is not None and key else keys
        self._dealer = AsyncDealer(address, identity, FROM_TEACHER, keys=own, max_message_bytes=limit)
        self._dealer.run_id = run_id
        self.asked: dict[int, asyncio.Future[Scored]] = {}
        self.failures = 0
        """Tries in a row that brought nothing."""
        self._reading = asyncio.create_task(self._read())

    @property
    def name(self) -> str:
        """Of messages."""
        return f"teacher {self.place.teacher!r} at {self.place.address.partition(' ')[0]}"

    async def ask(self, message: Score) -> Scored:
        """Scores of a request. Raises NotScored."""
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self.asked[message.number] = answer
        is_scored = False
        try:
            await self._dealer.send(message)
            scored = await answer
            is_scored = True
            return scored
        except ChannelError as error:
            raise NotScored(f"{self.name}: {error}") from error
        finally:
            self.failures = 0 if is_scored else self.failures + 1
            self.asked.pop(message.number, None)

    async def _read(self) -> None:
        while True:
            try:
                envelope = await self._dealer.receive(LOOK_S)
            except WireError as error:
                log.warning("a message of %s is refused: %s [corrupt]", self.name, error)
            except ChannelError as error:  # keys: for good
                self._fail(str(error))
                return
            else:
                if envelope is not None:
                    self._take(envelope.message)

    def _take(self, message: object) -> None:
        answer = self.asked.get(message.number) if isinstance(message, Scores | Refusal) else None
        if answer is None or answer.done():
            return  # of a try that was given up
        if isinstance(message, Refusal):
            answer.set_exception(NotScored(f"{self.name}: {message.reason}"))
            return
        assert isinstance(message, Scores)
        listed, own = (self.place.version, self.place.digest), (message.version, message.digest)
        if own != listed:
            said = f"version {own[0]} ({own[1]}), and replay lists {listed[0]} ({listed[1]})"
            kind, symptom = (NotScored, " [corrupt]") if own[0] == listed[0] else (OtherVersion, "")
            answer.set_exception(kind(f"{self.name} has scored with {said}{symptom}"))
            return
        scored = Scored(version=message.version, logprobs=message.logprobs, ids=message.ids, top=message.top)
        answer.set_result(scored)

    def _fail(self, why: str) -> None:
        for answer in self.asked.values():
            if not answer.done():
                answer.set_exception(NotScored(f"{self.name}: {why}"))

    def close(self, why: str) -> None:
        """Hang up: what was asked here is asked elsewhere."""
        self._reading.cancel()
        self._fail(why)
        self._dealer.close(0)


class Links:
    """All processes of teachers that replay lists."""

    def __init__(self, name: str, keys: Keys | None, limit: int) -> None:
        self._name, self._keys, self._limit = name, keys, limit
        self._links: dict[tuple[str, str], Link] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    def listed(self, entries: Sequence[Sequence[str | int]], run_id: str) -> None:
        """Replay's newest list: [name, address, version, digest] of each process."""
        places = {}
        for entry in entries:
            match entry:
                case [str(name), str(address), int(version), str(digest)] if ADDRESS.fullmatch(address):
                    places[name, address] = Place(name, address, version, digest)
                case _:
                    log.warning("replay lists %s, which is no teacher's place [corrupt]", shown(entry))
        for key in self._links.keys() - places.keys():
            self._links.pop(key).close("it is not there any more [closed]")
        for key, place in places.items():
            if key in self._links:
                self._links[key].place = place
            else:
                identity = f"{self._name}.{secrets.token_hex(4)}"
                self._links[key] = Link(place, identity, run_id, self._keys, self._limit)
        self._changed.set()
        self._changed = asyncio.Event()

    async def ask(self, message: Score) -> Scored:
        """Ask a process of the message's teacher that answers, the least busy, once there is one. Raises NotScored."""
        try:
            return await self._ask(message)
        except OtherVersion:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LISTED_S)
            return await self._ask(message)

    async def _ask(self, message: Score) -> Scored:
        while not (found := [link for link in self._links.values() if link.place.teacher == message.teacher]):
            await self._changed.wait()
        link = min(found, key=lambda one: (one.failures, len(one.asked)))
        return await link.ask(replace(message, number=next(self._numbers)))

    def missing(self, teacher: str) -> bool:
        """Whether no process of this teacher is there."""
        return not any(link.place.teacher == teacher for link in self._links.values())

    def close(self) -> None:
        """Hang up."""
        for link in self._links.values():
            link.close("this server leaves")
        self._links.clear()
