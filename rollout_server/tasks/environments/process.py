"""The rollout server's side of an environment process: starts it, runs episodes in it, kills it when it hangs.

What the function does between two turns may take environment.turn_timeout_s; a turn may stand still for as long, and
lasts as long as tokens come. An episode that is called off is cancelled in its process, whose loop says at once that it
has seen that; a process that does not within environment.turn_timeout_s is killed, with all that it has started, and
its other episodes begin again elsewhere. What the function then does to clean up may take as long, too; afterwards the
log names what is left behind.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from configs.environment import Environment
from rollout_server.engines.base import EngineError
from rollout_server.tasks.environments import EnvironmentFailed, EpisodeOver, Turn
from rollout_server.tasks.environments.protocol import LIMITS, MAX_BYTES, OVER, read_outcome, shown
from rollout_server.tasks.environments.session import Session
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.tasks.task import TaskError
from rollout_server.tasks.workers.process import LOST, Worker
from slipstream.runtime.hang import expired

log = logging.getLogger(__name__)
STOP_S = 2.0
"""For the last messages of a process that was killed."""
LOOKS = 4
"""So often a turn is looked at within environment.turn_timeout_s."""
FAILED = "environment_error"
"""Reason of a lease that failed by its environment."""
ENDINGS = ("done", "failed", "cancelled", "died")
"""The last message of an episode."""
NAMES = {kind: name for name, kind in OVER.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What an episode's function has returned."""

    reward: float | None
    metrics: dict[str, float]
    leave_out: list[int]
    blocked_s: float
    environment_s: float
    """The function's own time, between turns."""


@dataclass(slots=True, eq=False)
class _Episode:
    number: int
    session: Session
    inbox: asyncio.Queue[Sequence[Any]] = field(default_factory=asyncio.Queue)
    """What its function says, and beside that `answered`, `aborted` and `died`."""
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """What the function waits for."""
    given: dict[int, int] = field(default_factory=dict)
    """By call: the number of the turn that answered it."""
    has_ended: bool = False
    """Its function, or the process, so there is nothing left to cancel."""
    leaving: asyncio.Task[None] | None = None
    """Ends the function of an episode that was called off."""


class EnvironmentProcess:
    """One process at a time; after its death the next `ensure` starts a fresh one."""

    def __init__(
        self, environment: Environment, name: str, hidden: frozenset[str], charge: Callable[[list[str]], str],
        *, temperature: float,
    ) -> None:  # fmt: skip
        """A process that gets none of the `hidden` variables. `temperature` is rollout.temperature.

        `charge` is given the names of the episodes that a death has ended; its error are those of the prompt returned.
        """
        self.name, self._charge, self._settings = name, charge, environment
        self._order = {
            "function": environment.name,
            "options": dict(environment.options),
            "temperature": temperature,
            "turn_timeout_s": environment.turn_timeout_s,
        }
        self.worker = Worker("rollout_server.tasks.environments.worker", name, hidden, MAX_BYTES, LIMITS)
        self._reading: asyncio.Task[None] | None = None
        self._episodes: dict[int, _Episode] = {}
        self._leaving: dict[int, _Episode] = {}
        """Those that were called off and have not ended yet."""
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._killed = ""
        """Why this side has ended the process."""

    @property
    def load(self) -> int:
        """Episodes in it."""
        return len(self._episodes)

    async def ensure(self) -> None:
        """Start the process, unless it runs. Raises EnvironmentFailed: it cannot load the function."""
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            await self.stop()
            try:
                answer = await self.worker.start(self._order)
            except LOST as error:
                said = f"could not be loaded: {error or 'it takes too long'} {self.worker.last_line()}"
                answer = {"error": f"environment.function: {self._settings.name!r} {said}"}
            if answer != {"ready": True}:
                await self.stop()
                raise EnvironmentFailed(str(answer.get("error") if isinstance(answer, dict) else shown(answer)))
            self._killed = ""
            self._reading = asyncio.create_task(self._read())

    async def run(self, row: dict[str, Any], session: Session) -> EpisodeResult:
        """One episode. Raises LeaseFailed, EngineError: it has failed."""
        episode = _Episode(next(self._numbers), session)
        self._episodes[episode.number] = episode
        session.on_abort = lambda: episode.inbox.put_nowait(["aborted"])
        try:
            self.worker.send(["start", episode.number, row, session.seed, session.prompt_seed])
            async with asyncio.timeout(self._settings.episode_timeout_s):
                return await self._played(episode)
        except TimeoutError as error:
            said = "the episode took longer than {key} = {limit:g}"
            raise self._expired("episode_timeout_s", said, session.name, self.name) from error
        except (ValueError, TypeError, LookupError) as error:
            raise LeaseFailed(FAILED, f"{self.name} sent garbage: {error}") from error
        finally:
            session.on_abort = lambda: None
            del self._episodes[episode.number]
            for call in episode.calls.values():
                call.cancel()
            if not episode.has_ended:
                self._leaving[episode.number] = episode
                episode.leaving = asyncio.create_task(self._call_off(episode))

    async def _played(self, episode: _Episode) -> EpisodeResult:
        """What the function comes to; meanwhile it is given what it asks for. Raises as `run`, and for garbage."""
        own_s, loop = 0.0, asyncio.get_running_loop()
        while True:
            is_functions_turn, since = not episode.calls, loop.time()
            kind, *rest = await self._said(episode, self._settings.turn_timeout_s if is_functions_turn else None)
            own_s += loop.time() - since if is_functions_turn else 0.0
            if kind == "ask":
                self._ask(episode, *rest)
            elif kind == "answered":
                _check(episode.calls.pop(rest[0]))
            elif kind == "leave":
                self._take_back(episode, *rest)
            elif kind == "done":
                return EpisodeResult(**read_outcome(rest[0]), environment_s=own_s)
            elif kind == "failed":
                raise LeaseFailed(FAILED, str(rest[0]))
            elif kind == "cancelled":
                raise LeaseFailed(FAILED, "the function has cancelled itself")
            elif kind == "aborted":
                raise LeaseFailed("aborted", "the episode was called off")
            elif kind == "died":
                raise rest[0]
            else:
                raise ValueError(f"a message {shown(kind)}")

    async def _said(self, episode: _Episode, limit_s: float | None) -> Sequence[Any]:
        """The next message of an episode. Raises LeaseFailed: the function takes longer than it may."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await episode.inbox.get()
        except TimeoutError as error:
            if not limit.expired():
                raise
            after = f"after {episode.session.recorder.num_turns} turns"
            said = f"the environment took longer than {{key}} = {{limit:g}} {after}"
            what = f"the function of {episode.session.name} {after}"
            raise self._expired("turn_timeout_s", said, what, self.name) from error

    async def _call_off(self, episode: _Episode) -> None:
        """End the function of an episode. A process that does not even see that is ended: its event loop is blocked."""
        limit_s = self._settings.turn_timeout_s
        self.worker.send(["cancel", episode.number])
        heard = await self._heard(episode, "cancelling", *ENDINGS)
        if heard is None:
            last = self.worker.last_line()
            self._killed = f"it did not begin to cancel an episode within {limit_s:g} s; its last output: {last}"
            log.error("%s: %s; it is killed", self.name, self._killed)
            await self.worker.kill()
        elif heard == "cancelling" and await self._heard(episode, *ENDINGS) is None:
            log.warning(
                "%s: the function of %s was called off and has not ended within environment.turn_timeout_s = %g s; what"
                " it holds stays until the process ends [slow]", self.name, episode.session.name, limit_s,
            )  # fmt: skip
        del self._leaving[episode.number]

    async def _heard(self, episode: _Episode, *kinds: str) -> str | None:
        """The first message of these kinds of an episode that was called off; None: none in its time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.turn_timeout_s):
                while True:
                    kind, *rest = await episode.inbox.get()
                    if kind in kinds:
                        return str(kind)
                    if kind == "ask":
                        refusal = [*rest[:1], "the episode was called off", "refused"]
                        self.worker.send(["over", episode.number, *refusal])
        return None

    def _expired(self, key: str, said: str, what: str, owed_by: str) -> LeaseFailed:
        """An episode that fails because a deadline has passed, with the hang report of it."""
        limit, key = getattr(self._settings, key), f"environment.{key}"
        report = expired(what, owed_by=(owed_by,), waited_s=limit, key=key, ends=False)
        return LeaseFailed(FAILED, said.format(key=key, limit=limit) + report)

    async def _read(self) -> None:
        """Messages of the process, until it ends."""
        why = "it hung up"
        try:
            while True:
                kind, number, *rest = await self.worker.receive()
                if (episode := self._episodes.get(number) or self._leaving.get(number)) is not None:
                    episode.has_ended = episode.has_ended or kind in ENDINGS
                    episode.inbox.put_nowait([kind, *rest])
        except (ValueError, TypeError) as error:
            why = f"it sent garbage: {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        code, _, last = await self.worker.autopsy()
        running = [episode for episode in self._episodes.values() if not episode.has_ended]
        if self._killed or not running:  # for another's sake
            said, charged = f"{self.name} was killed: {self._killed}", ""
        else:
            said = f"{self.name} died: {why} (exit code {code}); last output: {last}"
            charged = self._charge([episode.session.name for episode in running])
        # Nothing is left to cancel, and the next process must not pay for the silence of this one.
        for episode in (*running, *self._leaving.values()):
            is_charged = bool(charged) and episode.session.name.startswith(f"{charged}/")
            episode.has_ended = True
            episode.inbox.put_nowait(["died", LeaseFailed(FAILED if is_charged else "aborted", said)])

    def _ask(self, episode: _Episode, call: int, what: str, arguments: dict[str, Any]) -> None:
        if call in episode.calls:
            raise ValueError(f"two calls with number {shown(call)}")
        task = episode.calls[call] = asyncio.create_task(self._answer(episode, call, what, dict(arguments)))
        task.add_done_callback(lambda _: episode.inbox.put_nowait(["answered", call]))

    def _take_back(self, episode: _Episode, call: int) -> None:
        """The function does not wait for a call any more; its answer may be under way already."""
        if (running := episode.calls.get(call)) is not None:
            running.cancel()
        if (number := episode.given.pop(call, None)) is not None:
            episode.session.forget(number)

    async def _answer(self, episode: _Episode, call: int, what: str, arguments: dict[str, Any]) -> None:
        """Give the function what it asks for, or say why not. Raises LeaseFailed, EngineError: the episode fails."""
        session, number, task = episode.session, episode.number, episode.session.task
        texts: dict[str, Callable[[Any], Any]] = {
            "encode": lambda text: task.encode_text(str(text)),
            "decode": lambda ids: task.decode(list(ids)),
            "pieces": lambda ids: task.pieces(list(ids)),
        }
        told = (lambda text: self.worker.send(["part", number, call, text])) if arguments.pop("stream", False) else None
        try:
            if what in texts:
                value = await session.beside(texts[what], arguments["given"])
            elif what == "turn":
                turn = await self._patiently(session, session.turn(**arguments, told=told))
                episode.given[call] = turn.number
                value = {name: getattr(turn, name) for name in Turn.__slots__}  # asdict would copy its long lists
            else:
                raise TaskError(f"{shown(what)} is nothing that can be asked")
        except EpisodeOver as over:
            self.worker.send(["over", number, call, str(over), NAMES[type(over)]])
        except TaskError as error:
            self.worker.send(["over", number, call, str(error), "refused"])
        except (TypeError, ValueError, KeyError) as error:  # of what the function has given
            raise LeaseFailed(FAILED, f"{shown(arguments)} cannot be asked of the engine: {error}") from error
        else:
            self.worker.send(["answer", number, call, value])

    async def _patiently(self, session: Session, turn: Coroutine[Any, Any, Turn]) -> Turn:
        """A turn, as long as tokens come: its own, or while it has none those of the requests before it.

        Raises LeaseFailed: none came for environment.turn_timeout_s.
        """
        limit, running, loop = self._settings.turn_timeout_s, asyncio.create_task(turn), asyncio.get_running_loop()
        seen, since = session.progress(), loop.time()
        try:
            while not (await asyncio.wait([running], timeout=limit / LOOKS))[0]:
                if (found := session.progress()) != seen:
                    seen, since = found, loop.time()
                elif loop.time() - since >= limit:
                    said = "a turn had no token for {key} = {limit:g}"
                    raise self._expired("turn_timeout_s", said, f"a turn of {session.name}", "the engine")
            return running.result()
        except asyncio.CancelledError:
            if running.done() and not running.cancelled() and running.exception() is None:
                session.forget(running.result().number)  # it had ended in the moment in which it was called off
            raise
        finally:
            running.cancel()

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        await self.worker.stop()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=STOP_S)
        self._reading = None


def _check(call: "asyncio.Task[None]") -> None:
    """Raises LeaseFailed, EngineError: a call has failed, so that its function would wait for ever."""
    if call.cancelled() or (error := call.exception()) is None:
        return
    if isinstance(error, LeaseFailed | EngineError):
        raise error
    raise LeaseFailed(FAILED, f"an unexpected {type(error).__name__}: {error}") from error
