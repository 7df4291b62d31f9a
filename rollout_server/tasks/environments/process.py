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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
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
NAMES = {kind: name for name, kind in OVER.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
    timeout_s: float
    late: Callable[["_Episode"], None]
    """Called when the function takes longer between two turns."""
    result: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    turns: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By call: what the function waits for."""
    given: dict[int, int] = field(default_factory=dict)
    """By call: the number of the turn that answered it."""
    own_s: float = 0.0
    own_since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    has_ended: bool = False
    """Its function, or the process, so there is nothing left to cancel."""

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def answered(self, call: int, task: asyncio.Task[None]) -> None:
        """A call has ended. What nothing provides for fails the episode: otherwise it would wait for its answer."""
        del self.turns[call]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(LeaseFailed(FAILED, f"an unexpected {type(error).__name__}: {error}"))
        if not self.turns and not self.result.done():
            self.functions_turn()

    def functions_turn(self) -> None:
        """The function has all that it asked for: its own time begins."""
        loop = asyncio.get_running_loop()
        self.own_since = loop.time()
        self.timer = loop.call_later(self.timeout_s, self.late, self)

    def engines_turn(self) -> None:
        """The function waits for a turn."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.own_s += asyncio.get_running_loop().time() - self.own_since


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
        self._killing: asyncio.Future[None] | None = None
        self._episodes: dict[int, _Episode] = {}
        self._cancelled: dict[int, tuple[str, asyncio.TimerHandle]] = {}
        """By number of an episode that has not ended yet: its name, and what its silence leads to."""
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

    async def run(self, row: dict[str, Any], session: Session) -> Outcome:
        """One episode. Raises LeaseFailed, EngineError, TaskError: it has failed."""
        episode = _Episode(next(self._numbers), session, self._settings.turn_timeout_s, self._late)
        self._episodes[episode.number] = episode
        session.on_abort = lambda: episode.fail(LeaseFailed("aborted", "the episode was called off"))
        try:
            self.worker.send(["start", episode.number, row, session.seed, session.prompt_seed])
            episode.functions_turn()
            async with asyncio.timeout(self._settings.episode_timeout_s) as limit:
                return await episode.result
        except TimeoutError as error:
            assert limit.expired()
            said = "the episode took longer than {key} = {limit:g}"
            raise self._expired("episode_timeout_s", said, session.name, self.name) from error
        finally:
            self._leave(episode)

    def _leave(self, episode: _Episode) -> None:
        """Forget an episode; where its function still runs, end that."""
        del self._episodes[episode.number]
        episode.engines_turn()
        for turn in list(episode.turns.values()):
            turn.cancel()
        if not episode.has_ended:
            self.worker.send(["cancel", episode.number])
            handle = asyncio.get_running_loop().call_later(self._settings.turn_timeout_s, self._give_up)
            self._cancelled[episode.number] = (episode.session.name, handle)

    def _late(self, episode: _Episode) -> None:
        after = f"after {episode.session.recorder.num_turns} turns"
        said = f"the environment took longer than {{key}} = {{limit:g}} {after}"
        episode.fail(
            self._expired("turn_timeout_s", said, f"the function of {episode.session.name} {after}", self.name)
        )

    def _expired(self, key: str, said: str, what: str, owed_by: str) -> LeaseFailed:
        """An episode that fails because a deadline has passed, with the hang report of it."""
        limit, key = getattr(self._settings, key), f"environment.{key}"
        report = expired(what, owed_by=(owed_by,), waited_s=limit, key=key, ends=False)
        return LeaseFailed(FAILED, said.format(key=key, limit=limit) + report)

    def _left_behind(self, number: int, name: str) -> None:
        del self._cancelled[number]
        log.warning(
            "%s: the function of %s was called off and has not ended within environment.turn_timeout_s = %g s; what it"
            " holds stays until the process ends [slow]", self.name, name, self._settings.turn_timeout_s,
        )  # fmt: skip

    def _give_up(self) -> None:
        """The process does not even see that an episode is called off: something blocks its event loop."""
        said, limit_s = self.worker.last_line(), self._settings.turn_timeout_s
        self._killed = f"it did not begin to cancel an episode within {limit_s:g} s; its last output: {said}"
        log.error("%s: %s; it is killed", self.name, self._killed)
        self._killing = asyncio.ensure_future(self.worker.kill())

    async def _read(self) -> None:
        """Messages of the process, until it ends."""
        why = "it hung up"
        try:
            while True:
                self._take(await self.worker.receive())
        except (ValueError, TypeError, LookupError) as error:
            why = f"it sent garbage: {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        code, _, last = await self.worker.autopsy()
        for _, handle in self._cancelled.values():
            handle.cancel()
        self._cancelled.clear()
        # Nothing is left to cancel, and the next process must not pay for the silence of this one.
        for episode in self._episodes.values():
            episode.has_ended = True
        running = [episode for episode in self._episodes.values() if not episode.result.done()]
        if self._killed or not running:  # for another's sake
            said, charged = f"{self.name} was killed: {self._killed}", ""
        else:
            said = f"{self.name} died: {why} (exit code {code}); last output: {last}"
            charged = self._charge([episode.session.name for episode in running])
        for episode in running:
            is_charged = bool(charged) and episode.session.name.startswith(f"{charged}/")
            episode.fail(LeaseFailed(FAILED if is_charged else "aborted", said))

    def _take(self, message: Any) -> None:
        kind, number, *rest = message
        if number in self._cancelled:
            self._take_late(kind, number, rest)
        if (episode := self._episodes.get(number)) is None:
            return
        episode.has_ended = episode.has_ended or kind in ("done", "failed", "cancelled")
        if kind == "ask":
            self._ask(episode, *rest)
        elif kind == "leave":
            self._call_off(episode, rest[0])
        elif kind == "done":
            episode.engines_turn()
            outcome = Outcome(**read_outcome(rest[0]), environment_s=episode.own_s)
            if not episode.result.done():
                episode.result.set_result(outcome)
        elif kind == "failed":
            episode.fail(LeaseFailed(FAILED, str(rest[0])))
        elif kind == "cancelled":
            episode.fail(LeaseFailed(FAILED, "the function has cancelled itself"))

    def _take_late(self, kind: Any, number: int, rest: list[Any]) -> None:
        """React to a message of an episode that was called off."""
        if kind == "ask":
            self.worker.send(["over", number, rest[0], "the episode was called off", "refused"])
        elif kind != "leave":
            name, handle = self._cancelled.pop(number)
            handle.cancel()
            if kind == "cancelling":  # its loop runs, and the function may clean up
                limit_s = self._settings.turn_timeout_s
                handle = asyncio.get_running_loop().call_later(limit_s, self._left_behind, number, name)
                self._cancelled[number] = (name, handle)

    def _ask(self, episode: _Episode, call: int, what: str, arguments: dict[str, Any]) -> None:
        if call in episode.turns:
            raise ValueError(f"two calls with number {shown(call)}")
        if not episode.turns:
            episode.engines_turn()
        task = episode.turns[call] = asyncio.create_task(self._answer(episode, call, what, dict(arguments)))
        task.add_done_callback(partial(episode.answered, call))

    def _call_off(self, episode: _Episode, call: int) -> None:
        """The function does not wait for a call any more; its answer may be under way already."""
        if (running := episode.turns.get(call)) is not None:
            running.cancel()
        if (number := episode.given.pop(call, None)) is not None:
            episode.session.forget(number)

    async def _answer(self, episode: _Episode, call: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            is_shown = arguments.pop("stream", False) is True
            told = partial(self._tell, episode.number, call) if is_shown else None
            value = await self._value(episode.session, what, arguments, told)
        except EpisodeOver as over:
            self.worker.send(["over", episode.number, call, str(over), NAMES[type(over)]])
        except TaskError as error:
            self.worker.send(["over", episode.number, call, str(error), "refused"])
        except (LeaseFailed, EngineError) as error:
            episode.fail(error)
        except (TypeError, ValueError, KeyError) as error:  # of what the function has given
            episode.fail(LeaseFailed(FAILED, f"{shown(arguments)} cannot be asked of the engine: {error}"))
        else:
            if what == "turn":
                episode.given[call] = value["number"]
            self.worker.send(["answer", episode.number, call, value])

    def _tell(self, episode: int, call: int, text: str) -> None:
        self.worker.send(["part", episode, call, text])

    async def _value(
        self, session: Session, what: str, arguments: dict[str, Any], told: Callable[[str], None] | None
    ) -> Any:
        task = session.task
        texts: dict[str, Callable[[Any], Any]] = {
            "encode": lambda text: task.encode_text(str(text)),
            "decode": lambda ids: task.decode(list(ids)),
            "pieces": lambda ids: task.pieces(list(ids)),
        }
        if what in texts:
            return await session.beside(texts[what], arguments["given"])
        if what != "turn":
            raise TaskError(f"{shown(what)} is nothing that can be asked")
        turn = await self._patiently(session, session.turn(**arguments, told=told))
        return {name: getattr(turn, name) for name in Turn.__slots__}  # asdict would copy its long lists

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
        finally:
            running.cancel()

    async def stop(self) -> None:
        """Kill the process and everything that it has started, and reap it."""
        await self.worker.stop()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=STOP_S)
        self._reading = None
