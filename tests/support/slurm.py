"""A Slurm cluster on one machine: munged, slurmctld, and a slurmd in a network namespace for each node."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import Switch, switched
from tests.support.runs import ROOT, environment
from tests.support.waiting import until

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
NODES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
CONTROLLER = "ctl"
CONF = """
ClusterName=slipstream
SlurmctldHost=ctl(10.0.0.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=15
KillWait=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""`cred_expire` is also how long a requeued job waits, two minutes where nothing is said."""


class Cluster:
    """Its daemons are children of this process; jobs run as this user, in the namespaces of their nodes."""

    def __init__(self, folder: Path, switch: Switch) -> None:
        self.folder, self.switch = folder, switch
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        (folder / "state").mkdir()
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=1" for name, address in NODES.items())
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes=nodes))
        (folder / "names").write_text(switch.names())
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        own = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        words = [f"--{option}={self.folder}/munge.{name}" for option, name in own.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *words)
        until((self.folder / "munge.socket").exists, "munged's socket")
        self._daemon(CONTROLLER, *self._inside(CONTROLLER, "slurmctld", "-D"))
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node, and wait until it can take a job."""
        self.switch.heal(node)
        self._daemon(node, *self._inside(node, "slurmd", "-D"))
        until(lambda: self.state(node) == "idle", f"{node} idle; {self.folder}/*.log say more")

    def state(self, node: str) -> str:
        """Such as `idle`, `mixed`, `down*`."""
        return self.run("sinfo", "--noheader", "--nodes", node, "--format=%T", check=False).strip()

    def run(self, *words: str, check: bool = True, **variables: str) -> str:
        """A command of Slurm, on the machine of the controller; its output."""
        done = subprocess.run(
            self._inside(CONTROLLER, *words),
            cwd=ROOT,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: str, **variables: str) -> str:
        """`sbatch` these words; the job's number."""
        return self.run("sbatch", "--parsable", *words, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        fields = self.run("scontrol", "--oneliner", "show", "job", number, check=False).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def has_ended(self, number: str) -> bool:
        """Whether the job is over, and not queued again."""
        return self.job(number).get("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def pids(self, node: str) -> list[int]:
        """Every process on that machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.switch.host(node)], capture_output=True, check=False)
        return list(map(int, listed.stdout.split()))

    def kill_node(self, node: str) -> None:
        """What a machine does that loses its power: nothing on it says a word any more, and all of it is gone."""
        self.switch.cut(node)
        while pids := self.pids(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.daemons[node].wait(10)

    def close(self) -> None:
        """End everything by pid, the daemons last."""
        for node in (*NODES, CONTROLLER):
            if node in self.daemons:
                self.kill_node(node)
        if "munged" in self.daemons:
            self.daemons["munged"].terminate()
            self.daemons["munged"].wait(10)

    def _inside(self, node: str, *words: str) -> list[str]:
        """There with a name of its own. `ip netns exec` would hide /sys/fs/cgroup, and slurmd wants to see it."""
        script = f'mount --bind {self.folder}/names /etc/hosts && hostname {node} && exec "$@"'
        entered = ["nsenter", f"--net=/run/netns/{self.switch.host(node)}", "unshare", "--mount", "--uts"]
        return [*entered, "bash", "-c", script, "-", *words]

    def _daemon(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Three nodes; skips the test where this machine cannot have them, and says why."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root")
    with switched({**NODES, CONTROLLER: "10.0.0.100"}) as switch:
        made = Cluster(folder, switch)
        try:
            made.start()
            yield made
        finally:
            made.close()
