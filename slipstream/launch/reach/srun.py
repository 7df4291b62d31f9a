"""The machines of the Slurm allocation that this process runs in, each reached by a step of srun."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configs.errors import BadHosts
from configs.placement import most_devices
from configs.schema import Config
from slipstream.launch.host_file import Host
from slipstream.launch.reach.commands import Commands
from slipstream.launch.terminal import say
from slipstream.plan.processes import Machine, uses_gpus

STEP = ("--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none")
"""Arguments of srun for one process on one machine, beside other steps there."""
ADDRESS = """if [[ -n "${SLIPSTREAM_INTERFACE:-}" ]]; then
  ip -4 -o addr show dev "$SLIPSTREAM_INTERFACE" | awk '{split($4, a, "/"); print a[1]; exit}'
else hostname -I | cut -d' ' -f1; fi"""
"""For bash: the machine's own address, of SLIPSTREAM_INTERFACE or else its first."""
JOB, NODES, CORES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CPUS_ON_NODE"
STEP_S = 60.0
"""For a step that shows an address; Slurm may hold it back until a resource is free."""


@dataclass(frozen=True, slots=True)
class Allocation(Commands):
    """The machines, in Slurm's order, and how steps start on them."""

    machines: tuple[str, ...]
    gpus: int
    """Of each step; 0 asks for none."""
    cores: str
    shares_files = True

    def step(self, machine: str, words: Sequence[str]) -> list[str]:
        """A command on one machine, in this folder; its output comes line by line."""
        own = [f"--nodelist={machine}", "--unbuffered", *([f"--cpus-per-task={self.cores}"] if self.cores else [])]
        return ["srun", *STEP, *own, *([f"--gpus-per-node={self.gpus}"] if self.gpus else []), *words]

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """A step on that host, whose `ssh` is the machine's name."""
        return self.step(host.ssh, words)

    def hosts(self, config: Config, *, only_rollouts: bool = False) -> dict[str, Host]:
        """The placement's nodes in the order of the machines, each with its own address. Raises ConfigError.

        With `only_rollouts` the learner's nodes are elsewhere.
        """
        shares = [share for share in config.shares if share.devices("rollout") or not only_rollouts]
        nodes = [share.node for share in shares]
        if len(self.machines) < len(nodes):
            raise BadHosts(
                f"placement: {len(nodes)} nodes ({', '.join(nodes)}), and the allocation has {len(self.machines)}"
                f" ({', '.join(self.machines)}); ask Slurm for --nodes={len(nodes)}, or correct the placement"
            )
        placed = list(zip(nodes, self.machines, strict=False))
        with ThreadPoolExecutor(max_workers=len(placed)) as pool:
            addresses = pool.map(lambda pair: self._address(pair[1]), placed)
            here = {node: Host(node, next(addresses), machine) for node, machine in placed}
        names = [share.node for share in config.shares]
        return {name: here.get(name) or Host(name, f"elsewhere-{name}", "") for name in names}

    def _address(self, machine: str) -> str:
        said = _said(self.step(machine, ["bash", "-c", ADDRESS]), f"{machine} was not asked for its address")
        if not said or not said[-1].strip():
            raise BadHosts(
                f"--slurm: {machine} shows no address; set SLIPSTREAM_INTERFACE to the interface that the nodes share"
            )
        return said[-1].strip()


def allocation(config: Config, environment: Mapping[str, str]) -> Allocation:
    """The one that these variables of Slurm are of. Raises ConfigError: there is none, or its machines are unknown."""
    if missing := [name for name in (JOB, NODES) if not environment.get(name)]:
        nodes = len(config.shares)
        raise BadHosts(
            f"--slurm: {missing[0]} is not set, so this shell is not in an allocation of Slurm; get one with `salloc"
            f" --nodes={nodes} --ntasks-per-node=1`, or write the command into a file for sbatch"
        )
    machines = _said(["scontrol", "show", "hostnames", environment[NODES]], f"{NODES} {environment[NODES]!r}")
    if not machines:
        raise BadHosts(f"--slurm: {NODES} {environment[NODES]!r} names no machine")
    counts = [most_devices(share) for share in config.shares if uses_gpus(config, Machine(""))]
    return Allocation(tuple(machines), max(counts, default=0), environment.get(CORES, ""))


def _said(command: Sequence[str], what: str) -> list[str]:
    """Lines of a command's output. Raises ConfigError: it is not there, fails, or takes longer than STEP_S."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STEP_S, check=False
        )
    except OSError as error:
        raise BadHosts(
            f"--slurm: {command[0]} cannot be started ({error.strerror}); run doctor on a machine of the cluster that"
            " has Slurm's commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BadHosts(
            f"--slurm: {what}: {command[0]} was not done within {STEP_S:g} s; `squeue --steps` shows what holds it"
        ) from error
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        raise BadHosts(f"--slurm: {what}: {command[0]} ended with exit code {done.returncode}: {last}")
    return done.stdout.splitlines()


def requeue(job: str, run_dir: str, *, was_of_use: bool) -> None:
    """Queue this job again: its next start resumes the run. Says how to go on where Slurm refuses, or it is no use."""
    if not was_of_use:
        say(f"job {job} is not queued again: this start has trained no step")
        return
    say(f"job {job} is queued again, and resumes {run_dir}")
    try:
        _said(["scontrol", "requeue", job], f"job {job} is not queued again")
    except BadHosts as refusal:
        say(f"{refusal}; go on with a new job: sbatch FILE --set run.name={Path(run_dir).name}")


def of_this_process(config: Config) -> Allocation:
    """The allocation of this shell. Raises ConfigError."""
    return allocation(config, os.environ)
