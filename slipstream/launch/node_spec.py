"""What one node runs, and what that means there: the same for ssh, Slurm and Kubernetes.

Over ssh and srun a node spec is one line of JSON on stdin; in Kubernetes it is made of files that the node sees.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import BadHosts, BadOption
from configs.loading import dump, parse
from configs.placement import ONLY_NODE, most_devices
from configs.schema import Config
from slipstream.launch.host_file import Host, parse_hosts
from slipstream.launch.machine import this_machine
from slipstream.plan.processes import Machine, Plan, assign, replay_address

NodeRole = Literal["learner", "rollout"]
ROLES: tuple[NodeRole, ...] = ("learner", "rollout")


class NodeSpec(BaseModel):
    """One node's part of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: NodeRole
    node: str
    config: str
    """The configuration as YAML, the same for all nodes."""
    hosts: str
    """The host file's text."""
    replay: str | None = None
    """Address of replay; None takes that of the first learner node."""
    resume: str | None = None
    """Folder of the run that the learner resumes."""
    resume_if_begun: bool = False
    """Where the run folder is, resume it: no other job has its name."""
    job: str = ""
    """What one start of the nodes is called: where a learner of this job has begun a run, another one resumes it."""
    keys: dict[str, str] = Field(default={}, repr=False)
    """Key files by their path inside network.keys."""
    environment: dict[str, str] = Field(default={}, repr=False)
    """Variables of all processes, such as secrets of trackers; they are in no file."""

    def line(self) -> str:
        """One line of JSON."""
        return self.model_dump_json() + "\n"


def read_spec(line: str) -> NodeSpec:
    """The node spec of a line. Raises ConfigError."""
    try:
        return NodeSpec.model_validate_json(line)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'line'}: {each['msg']}" for each in error.errors())
        raise BadHosts(
            f"the order on stdin, {line[:80]!r}, is not valid ({wrong}): is this the same version on all nodes?"
        ) from error


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """What a node spec means on this machine."""

    spec: NodeSpec
    config: Config
    """With this node's own network.host."""
    config_file: Path
    plan: Plan
    """This node's processes."""

    @property
    def is_first(self) -> bool:
        """Whether replay and the launcher run here."""
        return self.spec.node == self.config.shares[0].node


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that make a node spec of files."""
    parser.add_argument("--role", choices=ROLES, help="which part of the node")
    parser.add_argument("--node", metavar="NAMES", help="its name in the placement; of several, --index chooses one")
    parser.add_argument("--index", type=int, default=0, help="which of the names of --node (default: the first)")
    parser.add_argument("--hosts", metavar="FILE", help="host file")
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    parser.add_argument("--replay", help="address of replay (default: that of the first learner node)")
    parser.add_argument("--host", help="this machine's own address (default: as in the host file)")
    parser.add_argument("--renumber", action="store_true", help="only the GPUs of this role are visible here")
    parser.add_argument(
        "--resume-if-begun", action="store_true", help="run.name is this job's own: where its folder is, resume it"
    )


def spec_of_arguments(args: argparse.Namespace) -> NodeSpec:
    """The node spec of those arguments. Raises ConfigError."""
    missing = [f"--{name}" for name in ("role", "node", "hosts", "config") if getattr(args, name) is None]
    if missing:
        raise BadOption(f"{', '.join(missing)} missing; give them, or --stdin")
    names = args.node.split(",")
    if not 0 <= args.index < len(names):
        raise BadHosts(f"--index {args.index}: --node names {len(names)} nodes")
    try:
        hosts = Path(args.hosts).read_text(encoding="utf-8")
        text = Path(args.config).read_text(encoding="utf-8")
    except OSError as error:
        raise BadHosts(f"{error.filename}: not readable ({error.strerror})") from error
    config, node = dump(parse(text, args.config, args.set)), names[args.index]
    begun = args.resume_if_begun
    return NodeSpec(role=args.role, node=node, config=config, hosts=hosts, replay=args.replay, resume_if_begun=begun)


def resolve(spec: NodeSpec, *, host: str | None = None, renumber: bool = False, write: bool = True) -> NodeAssignment:
    """Make the plan for this machine, and with `write` its configuration in `<run folder>/launch/`.

    Args:
        spec: what to run.
        host: this machine's own address, where the host file does not have it.
        renumber: the machine shows this role's GPUs only, from 0 on (a container), whatever the placement calls them.
        write: the configuration file.

    Raises:
        ConfigError: this node's configuration or the host file is not valid, or the placement does not fit here.
    """
    shared = config_of(spec.config)
    hosts = hosts_of(shared, parse_hosts(spec.hosts, "host file", is_made=True))
    if spec.node not in hosts:
        raise BadHosts(f"placement: no process of this run belongs to {spec.node!r}; nodes: {', '.join(hosts)}")
    replay = spec.replay
    if spec.role == "rollout" and replay is None:  # its node may be another pod than the learner's
        replay = replay_address(shared, hosts[shared.shares[0].node].machine())
    config = config_of(spec.config, [f"network.host={host or hosts[spec.node].address}"])
    here = this_machine(config)
    if renumber:
        here = renumbered(config, spec, here)
    config_file = Path(shared.run_dir) / "launch" / f"{spec.node}-{spec.role}.yaml"
    plan = assign(
        shared,
        {name: found.machine() for name, found in hosts.items()} | {spec.node: here},
        config_file=str(config_file),
        python=sys.executable,
        replay=replay,
        resume=spec.resume is not None,
        only=spec.node,
    )
    if write:
        config_file.parent.mkdir(parents=True, exist_ok=True)
        config_file.write_text(spec.config, encoding="utf-8")
    return NodeAssignment(spec, config, config_file, plan)


def config_of(text: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a node spec. Raises ConfigError."""
    return parse(text, "the order's configuration", overrides)


def hosts_of(config: Config, hosts: Mapping[str, Host]) -> dict[str, Host]:
    """The hosts of the placement, in its order; `placement.split` takes the only one. Raises ConfigError."""
    if config.placement.rollout is None:
        if len(hosts) != 1:
            raise BadHosts(
                f"placement.split: {config.placement.split!r} is for one host, the host file has {len(hosts)}; give"
                " placement.rollout and placement.learner"
            )
        return {ONLY_NODE: next(iter(hosts.values()))}
    missing = [share.node for share in config.shares if share.node not in hosts]
    if missing:
        raise BadHosts(
            f"placement: {', '.join(missing)} not in the host file, which has {', '.join(hosts)}; add a line for each,"
            " or correct placement.rollout, placement.learner"
        )
    return {share.node: hosts[share.node] for share in config.shares}


def renumbered(config: Config, spec: NodeSpec, here: Machine) -> Machine:
    """This machine with names for its GPUs such that the role's devices are 0, 1, 2, ... of what it shows."""
    (share,) = [share for share in config.shares if share.node == spec.node]
    devices = share.devices(spec.role)
    if here.gpus is not None and 0 < here.gpus < len(devices):
        raise BadHosts(
            f"placement: {spec.node} gives {len(devices)} GPUs to the {spec.role}, this container has {here.gpus}"
        )
    shown = here.visible or tuple(str(index) for index in range(len(devices)))
    names = dict(zip(sorted(devices), shown, strict=False))
    every = most_devices(share)
    return Machine(here.address, gpus=here.gpus and every, visible=tuple(names.get(i, "none") for i in range(every)))
