"""`python -m slipstream.launch.node`: one node's part of a run, under whatever started it.

Over ssh and srun its order comes as the first line of stdin, and the end of stdin (the session or the start script is
gone) ends everything here. Kubernetes gives it files instead, and ends it itself.
"""

import argparse
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.errors import BadHosts
from configs.loading import ConfigError
from configs.schema import Config, is_loopback
from replay.channel import ChannelError
from replay.channel.keys import PeerSilent
from replay.status_client import ask_replay
from slipstream.check.checks import check_available
from slipstream.launch import children, ready
from slipstream.launch.children import Child, Tail
from slipstream.launch.key_files import write_keys
from slipstream.launch.learner.node import LearnerNode, Terminal
from slipstream.launch.node_spec import (
    NodeAssignment,
    add_spec_arguments,
    read_spec,
    resolve,
    spec_of_arguments,
)
from slipstream.launch.reach import END, UP
from slipstream.launch.run_folder import JOB, folder_of
from slipstream.launch.servers import EndedForGood, LocalServers, NoneCanStart, RunFailed
from slipstream.launch.terminal import Interrupted, catch_signals, ignore_signals, write_line
from slipstream.runtime import hang
from slipstream.runtime.lifeline import CANNOT_GO_ON, CANNOT_START, RUN_FAILED, START_REFUSED, TRY_AGAIN

POLL_S = 0.1
SPEC_S = 60.0
"""How long the order may take to come."""
PATIENCE_S = 30.0
"""The launcher writes a checkpoint within 15 s and its children end within 5 s; a rollout server leaves in order."""


def main() -> int:
    """Entry point: 0 when this node's part ended well."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.launch.node", description=__doc__)
    parser.add_argument("--stdin", action="store_true", help="the order is the first line of stdin; its end ends all")
    parser.add_argument("--ready-file", type=Path, help="kept new while all processes here take part in the run")
    add_spec_arguments(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")

    def run() -> int:
        spec = read_spec(first_line()) if args.stdin else spec_of_arguments(args)
        assignment = resolve(spec, host=args.host, renumber=args.renumber)
        check_address(assignment.config, spec.node)
        write_keys(assignment.config.network.keys, spec.keys)
        os.environ.update(spec.environment)  # of the children; /proc shows what this process was started with
        if args.stdin:
            write_line(sys.stdout, UP)
        node = Node(assignment, lifeline=args.stdin, ready_file=args.ready_file)
        code = node.run_learner() if spec.role == "learner" else node.run_servers()
        if args.stdin and code == 0:
            write_line(sys.stdout, END)
        return code

    return exit_code_of(run)


def exit_code_of(run: Callable[[], int]) -> int:
    """Run a node's part; what ends it is said in one line, and its exit code says whether another start may help."""
    catch_signals()
    try:
        return run()
    except PeerSilent as silence:  # a scheduler may start the nodes hours apart: unlike a refusal, another start helps
        show(str(silence))
        return TRY_AGAIN
    except (ConfigError, ChannelError) as error:
        show(f"refused: {error}")
        return CANNOT_GO_ON
    except RunFailed as failure:
        show(str(failure))
        if isinstance(failure, NoneCanStart):  # after RUN_FAILED a rollout node is started again while a learner may be
            return CANNOT_GO_ON
        return RUN_FAILED if isinstance(failure, EndedForGood) else 1
    except Interrupted as ended:
        show(f"ended: {ended}")
        return 130


def check_address(config: Config, node: str) -> None:
    """Raises ConfigError: the node's name means a loopback address on this machine, where no other node reaches it."""
    host = config.network.host
    if len(config.shares) < 2:
        return
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return  # what binds it names it; a name server of a cluster may be late
    if all(map(is_loopback, found)):
        raise BadHosts(
            f"host file: {host!r}, the address of {node}, is {found[0]} on that machine, where no other node reaches"
            f" it; write the machine's address on the network into the host file (`hostname -I` on {node} shows it), or"
            f" take {host!r} out of the loopback line of its /etc/hosts"
        )


class Node:
    """The processes of one role on this machine."""

    def __init__(self, assignment: NodeAssignment, *, lifeline: bool, ready_file: Path | None = None) -> None:
        check_available(assignment.config, runs_servers=assignment.spec.role == "rollout")
        self.assignment, self.config = assignment, assignment.config
        self._lifeline, self._ready_file = lifeline, ready_file
        self._tails: dict[Path, Tail] = {}
        self._parent = ("--parent", str(os.getpid()))
        self._next_look = time.monotonic()

    def run_learner(self) -> int:
        """Replay, the launcher and rank 0 on the first learner node, ranks alone on the others; the exit code."""
        if not self.assignment.is_first:
            terminal = Terminal(self._breathe, self._follow, show)
            try:
                return LearnerNode(self.assignment, self._wait_for_run_name(), terminal).run()
            finally:
                self._show_logs()
        child = self._launcher()
        try:
            while child.exit_code() is None:
                self._breathe()
        finally:
            ignore_signals()
            children.stop([child], PATIENCE_S)
            self._show_logs()
        if child.exit_code() == CANNOT_GO_ON:
            show(child.root_cause())
            return CANNOT_GO_ON
        if child.exit_code() == TRY_AGAIN:
            show(child.root_cause())
            return TRY_AGAIN
        if child.exit_code() == 1:  # the run has failed; its launcher lives
            raise EndedForGood(child.root_cause())
        if child.exit_code() != 0:
            raise RunFailed(child.root_cause())
        return 0

    def run_servers(self) -> int:
        """Rollout servers, started again as the launcher does, until the run ends. Raises RunFailed if one fails."""
        plan, node = self.assignment.plan, self.assignment.spec.node
        of_others = () if self.assignment.is_first else plan.of(node, "teacher")
        by_name = {process.name: process for process in (*plan.of(node, "rollout"), *of_others)}
        logs = Path(self.config.run_dir) / "logs"

        def start(name: str) -> Child:
            command = [*by_name[name].command, *self._parent]
            return self._child(name, command, logs / f"{name}.log", by_name[name].environment)

        servers = LocalServers(self.config.rollout, start, show)
        teachers = LocalServers(self.config.rollout, start, show, are_teachers=True)
        try:
            for process in by_name.values():
                (teachers if process.role == "teacher" else servers).add(process.name)
            while not (servers.all_over and teachers.all_over):
                silent = self._look().get("silent", ())
                for group in (servers, teachers):
                    group.end_silent(silent)
                    group.watch(run_is_over=True)
                self._breathe()
        finally:
            ignore_signals()
            children.stop([*servers.children, *teachers.children], PATIENCE_S)
            self._show_logs()
        if failures := servers.failures | teachers.failures:
            final = all(code in (RUN_FAILED, CANNOT_START, START_REFUSED) for code in failures.values())
            raise (EndedForGood if final else RunFailed)(f"given up: {', '.join(failures)}")
        return 0

    def _look(self) -> Mapping[str, Any]:
        """Replay's status, also for the file of readiness; empty between two looks, and while it does not answer."""
        if time.monotonic() < self._next_look:
            return {}
        self._next_look = time.monotonic() + min(self.config.network.silent_after_s, ready.LOOK_S)
        state: Mapping[str, Any] = {}
        with suppress(ChannelError):  # keys that are refused: the servers say so
            answer = ask_replay(self.assignment.plan.replay, self.config.network.keys, 1.0)
            state = answer.state if answer is not None else {}
        if self._ready_file is not None:
            ready.note(self._ready_file, ready.absent(self.assignment, state))
        return state

    def _launcher(self) -> Child:
        spec, run_dir = self.assignment.spec, Path(self.config.run_dir)
        resume = spec.resume
        begun = run_dir if spec.resume_if_begun else folder_of(spec.job, self.config)
        if resume is None and begun is not None and decide(begun, show):
            resume = str(begun)
        network = self.config.network
        settings = [f"network.host={network.host}", f"network.replay_port={network.replay_port}"]
        # a resumed run as well: all ranks of one start have the configuration of the job, whatever the folder has
        source = ["--config", str(self.assignment.config_file), *(["--resume", resume] if resume else [])]
        command = [sys.executable, "-m", "learner.main", *source, *self._parent]
        command += [word for setting in (*settings, "placement.local_rollouts=false") for word in ("--set", setting)]
        return self._child("launcher", command, run_dir / "launch" / f"{spec.node}-launcher.log", {JOB: spec.job})

    def _wait_for_run_name(self) -> str:
        """The first learner node chooses the name of the run (a taken one is passed over); replay knows it.

        Raises:
            ChannelError: replay does not answer within placement.give_up_after_s.
        """
        limit, address = self.config.placement.give_up_after_s, self.assignment.plan.replay
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            answer = ask_replay(address, self.config.network.keys, 1.0)
            if answer is not None:
                return answer.run_name
            self._breathe()
        key = "placement.give_up_after_s"
        raise ChannelError(
            f"{self.assignment.spec.node} waited {limit:g} s for replay at {address} ({key}): nothing came; is it"
            " started, and does a firewall let this node through?"
            f"{self._report(f'replay at {address}', limit, key)}",
            "silent",
        )

    def _report(self, what: str, waited_s: float, key: str) -> str:
        """The hang report of this node, which is noted as a process of the run only now that it has waited in vain."""
        name = f"node-{self.assignment.spec.node}"
        hang.begin(name, self.config.run_dir, replay=self.assignment.plan.replay, keys=self.config.network.keys)
        return hang.expired(what, owed_by=("replay",), waited_s=waited_s, key=key)

    def _child(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        self._follow(log)
        return children.start(name, command, log, environment)

    def _follow(self, log: Path) -> None:
        self._tails.setdefault(log, Tail.from_end(log))

    def _breathe(self) -> None:
        """Show what the children wrote, look whether ranks take part, and end with what started this node."""
        self._show_logs()
        if self._ready_file is not None and self.assignment.spec.role == "learner":
            self._look()
        if self._lifeline and select.select([0], [], [], 0)[0] and not os.read(0, 1 << 16):
            raise Interrupted("the session that started this node is over")
        time.sleep(POLL_S)

    def _show_logs(self) -> None:
        for tail in self._tails.values():
            for line in tail.new_lines():
                write_line(sys.stdout, line)


def first_line() -> str:
    """The first line of stdin. Raises ConfigError when none comes."""
    deadline, found = time.monotonic() + SPEC_S, b""
    while not found.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([0], [], [], left)[0]:
            raise BadHosts(f"no order came on stdin within {SPEC_S:g} s")
        piece = os.read(0, 1 << 16)
        if not piece:
            raise BadHosts("stdin ended before the order was whole")
        found += piece
    return found.decode("utf-8", "replace")


def show(text: str) -> None:
    """Write one line to standard output, which may have no reader any more."""
    write_line(sys.stdout, f"slipstream: {text}")


# ---- a job that its scheduler starts again ------------------------------------------------------------------


def decide(run_dir: Path, say: Callable[[str], object]) -> bool:
    """Whether this start of a job resumes the job's run folder; says which, and why.

    Slurm requeues a preempted job, Kubernetes recreates its pods. The run has a name that no other job has, so its
    folder was made by an earlier start of the same job. One that ended before replay opened its journal leaves nothing
    but config.yaml: it is removed, and the run begins under its own name.
    """
    kept = ("journal/*.seg", "checkpoints/step_*/COMPLETE")
    if (run_dir / "config.yaml").is_file() and any(any(run_dir.glob(pattern)) for pattern in kept):
        say(f"{run_dir} was begun by an earlier start of this job: resumes it from its journal and newest checkpoint")
        return True
    (run_dir / "config.yaml").unlink(missing_ok=True)
    say(f"{run_dir} has no journal and no complete checkpoint: begins the run")
    return False


if __name__ == "__main__":
    sys.exit(main())
