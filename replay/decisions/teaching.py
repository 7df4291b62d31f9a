"""Where teachers are: admits their processes, and says to rollout servers which there are. No socket."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from configs.schema import Config
from configs.teachers import Teacher
from replay import messages as m
from replay.endings import NoTeacher
from replay.scores import unlike
from replay.state.peers import Peer, Peers
from replay.state.run import RunState


class TeacherDirectory:
    """Knows the processes of teachers by what they say in Hello."""

    def __init__(self, run: RunState, peers: Peers, *, fail: Callable[[str], None], now: float) -> None:
        config: Config = run.config
        self.run, self.peers, self._fail = run, peers, fail
        scored = {} if config.scoring is None else config.scoring.teachers
        self.wanted: Mapping[str, Teacher] = {name: one for name, one in scored.items() if one.has_process}
        """Teachers that rollout servers ask, each a process or several."""
        self.missing = dict.fromkeys(self.wanted, now)
        """Those of which no process is here, and since when."""
        self._told: list[list[str | int]] = []

    def problem(self, hello: m.Hello) -> str | None:
        """Why this process cannot be a teacher of the run, or None."""
        teacher = self.wanted.get(hello.teacher)
        if teacher is None:
            known = ", ".join(self.wanted) or "none"
            return f"teachers: {hello.teacher!r} is no teacher with a process of its own in this run ({known} is)"
        if not m.ADDRESS.fullmatch(hello.address):
            given = f"{hello.name!r} gives {hello.address[:80]!r}"
            return f"teachers.{hello.teacher}: {given}, which is no address where rollout servers could ask it"
        if (problem := unlike(teacher, hello.teacher, hello.version)) is not None:
            return f"teachers.{hello.teacher}: {hello.name!r} has version {hello.version}: {problem}"
        others = [peer for peer in self.processes(hello.teacher) if peer.name != hello.name]
        other = next((peer for peer in others if peer.hello.digest != hello.digest), None)
        if other is not None and not teacher.is_refreshed:
            return (
                f"teachers.{hello.teacher}: {hello.name!r} holds weights {hello.digest}, and {other.name!r}"
                f" {other.hello.digest}; give both the same folder [corrupt]"
            )
        return None

    def welcome(self, peer: Peer) -> m.Welcome:
        """The run as this teacher needs it: with the address of its own weight bus."""
        return replace(self.run.welcome(), bus_address=self.run.teacher_buses.get(peer.hello.teacher))

    def changed(self, newcomer: Peer | None = None) -> None:
        """Say where teachers are: to all rollout servers where that is another list, and to a newcomer anyway.

        Without those that wait for weights, and those whose weights are of policies that are lost.
        """
        newest = self.run.newest_possible
        here = [peer.hello for peer in self.peers.role("teacher") if peer.hello.digest and peer.hello.version <= newest]
        entries: list[list[str | int]] = [[one.teacher, one.address, one.version, one.digest] for one in here]
        entries.sort(key=lambda entry: (str(entry[0]), str(entry[1])))
        if entries != self._told:
            self._told = entries
            self.peers.to_servers(m.Teachers(entries=entries))
        elif newcomer is not None and self.wanted:
            self.peers.send(newcomer.identity, m.Teachers(entries=entries))

    def beat(self, peer: Peer) -> None:
        """A teacher lives; it may have missed that a learner has started."""
        bus = self.run.teacher_buses.get(peer.hello.teacher)
        if bus is not None and bus != peer.hello.bus_address:
            self.peers.send(peer.identity, self.welcome(peer))

    def learner_started(self, hello: m.Hello) -> None:
        """Rank 0 is here: where it refreshes teachers is news to them."""
        self.run.teacher_buses = hello.teacher_buses
        for peer in self.peers.role("teacher"):
            self.peers.send(peer.identity, self.welcome(peer))

    def watch(self, now: float, *, runs: bool) -> None:
        """Note since when teachers are missing; one that is for too long, and not left out, ends the run."""
        for name, teacher in self.wanted.items():
            if not runs or self.processes(name):
                self.missing[name] = now
            elif now - self.missing[name] > teacher.wait_s and teacher.on_error == "wait":
                what = f"no process of teacher {name!r} for {teacher.wait_s:g} s (teachers.{name}.wait_s)"
                self._fail(str(NoTeacher(f"{what}; its logs end with the reason [silent]")))

    def processes(self, name: str) -> list[Peer]:
        """Those that hold weights which were proven."""
        return [peer for peer in self.peers.role("teacher") if peer.hello.teacher == name and peer.hello.digest]
