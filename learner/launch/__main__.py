"""`python -m learner.launch learner|rollout`: one side of a run on this host, over ssh, under Slurm or in Kubernetes.

Without --hosts, --slurm or --kubernetes it is this host's: `learner` takes the arguments of `python -m learner.main`,
`rollout` starts `--servers N` with the arguments of `python -m rollout_server.main`. `--dry-run` shows what would run.
PORT (default 5757) is replay's port where network.replay_port is 0; REPLAY is its address for rollout servers.
"""

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from configs.loading import ConfigError, Parser, add_arguments, dump, from_arguments, load, overrides_of
from configs.placement import PlacementError
from configs.plan import Machine, Plan, Role, assign, table
from configs.schema import Config
from learner.launch.hosts import here, kubernetes, slurm, ssh
from learner.launch.hosts.host_file import Host, HostsError, read_hosts
from learner.launch.hosts.key_files import keys_for
from learner.launch.hosts.node_spec import NodeRole, NodeSpec, config_of, hosts_of
from replay.channel import KeysError

DEFAULT_PORT = "5757"
SHOWN: dict[NodeRole, tuple[Role, ...]] = {"learner": ("replay", "learner"), "rollout": ("rollout",)}
EVERYTHING: tuple[Role, ...] = ("replay", "learner", "rollout")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    args: argparse.Namespace
    role: NodeRole
    config: Config
    text: str
    """The configuration that is shipped, as YAML."""

    @property
    def replay(self) -> str | None:
        """Address of replay, where it is given."""
        return self.args.replay or os.environ.get("REPLAY") or None


def main() -> int:
    """Entry point."""
    parser = _parser()
    args, unknown = parser.parse_known_args()
    port = os.environ.get("PORT", DEFAULT_PORT)
    if args.hosts is None and not args.slurm and not args.kubernetes:
        if sys.argv[1] != args.role:
            parser.error(f"{args.role!r} comes first: python -m learner.launch {args.role} ...")
        words = sys.argv[2:]
        if args.role == "learner":
            here.become_learner(words, port)
        return here.run_servers(words, os.environ.get("REPLAY", f"tcp://127.0.0.1:{port}"))
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    try:
        request = _request(args, port)
        if args.hosts is not None:
            return _over_ssh(request)
        return _under_slurm(request) if args.slurm else _in_kubernetes(request)
    except (ConfigError, PlacementError, HostsError, KeysError) as error:
        ssh.say(f"refused: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m learner.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("role", choices=["learner", "rollout"], help="which side to start")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", metavar="FILE", type=Path, help="over ssh: lines `name address [ssh=user@host] [gpus=8]`"
    )
    where.add_argument("--slurm", action="store_true", help="write a file for sbatch")
    where.add_argument("--kubernetes", action="store_true", help="write manifests of a JobSet")
    parser.add_argument("--dry-run", action="store_true", help="show what would run where; start and write nothing")
    parser.add_argument("--out", metavar="PATH", type=Path, help="where Slurm's file or Kubernetes' folder is written")
    parser.add_argument("--replay", help="address of replay (default: first learner node and network.replay_port)")
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on from the newest complete checkpoint of this run")
    parser.add_argument("--gpus-per-node", type=int, help="Slurm: GPUs of a node (default: as placed)")
    parser.add_argument(
        "--image", default="slipstream:latest", help="Kubernetes: container image (default: %(default)s)"
    )
    parser.add_argument(
        "--claim", default="slipstream", help="Kubernetes: PersistentVolumeClaim (default: %(default)s)"
    )
    add_arguments(parser)
    return parser


def _request(args: argparse.Namespace, port: str) -> Request:
    if args.resume is not None and args.hosts is None:
        raise ConfigError(
            "--resume: only with --hosts, or on the first learner node with `python -m learner.main --resume`; the"
            " files for Slurm and Kubernetes always begin a new run"
        )
    if args.resume is not None:
        folder = Path(args.resume)
        place = [f"run.name={folder.resolve().name}", f"run.dir={folder.parent}"]
        config = load(folder / "config.yaml", [*place, *overrides_of(args)])
    else:
        config = from_arguments(args)
        if config.placement.device == "auto" and config.placement.rollout is None:
            raise ConfigError(
                "placement.device: 'auto' with placement.split would take the device of this machine for that of the"
                " run's; give --set placement.device=cuda, or cpu"
            )
    overrides = ["placement.local_rollouts=false", "network.host=127.0.0.1"]
    if config.network.replay_port == 0:
        overrides.append(f"network.replay_port={port}")
    config = config_of(dump(config), overrides)
    return Request(args, args.role, config, dump(config))


# ---- ssh ----------------------------------------------------------------------------------------------------


def _over_ssh(request: Request) -> int:
    hosts = hosts_of(request.config, read_hosts(request.args.hosts))
    for name, host in hosts.items():
        try:
            config_of(request.text, [f"network.host={host.address}"])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    plan = _plan(request, {name: host.machine() for name, host in hosts.items()})
    specs = [(_spec_of(request, plan, name, hosts), hosts[name]) for name in plan.nodes(request.role)]
    if not request.args.dry_run:
        return ssh.run(specs, request.role, os.getcwd(), sys.executable)
    _show(table(plan, SHOWN[request.role]))
    for spec, host in specs:
        line = ssh.remote_line(spec, os.getcwd(), sys.executable)
        _show(f"\n{spec.node}: {shlex.join([*ssh.ssh_command(), host.ssh, line])}")
        for name in sorted(spec.keys):
            _show(f"  copies {request.config.network.keys}/{name} (mode 0600)")
    ssh.say(f"dry run: {request.config.arithmetic()}")
    return 0


def _spec_of(request: Request, plan: Plan, node: str, hosts: Mapping[str, Host]) -> NodeSpec:
    return NodeSpec(
        role=request.role,
        node=node,
        config=request.text,
        hosts="".join(f"{host.name} {host.address}\n" for host in hosts.values()),
        replay=request.replay,
        resume=request.args.resume,
        overrides=overrides_of(request.args),
        # a rollout server beside replay finds the learner's keys there, and takes them
        keys=keys_for(request.config.network.keys, node, serves=node == plan.first_node),
    )


# ---- Slurm --------------------------------------------------------------------------------------------------


def _under_slurm(request: Request) -> int:
    plan = _plan(request, slurm.machines(request.config))
    made = slurm.sbatch(
        request.config,
        plan,
        request.role,
        root=Path.cwd(),
        python=sys.executable,
        path=request.args.out,
        gpus=request.args.gpus_per_node,
    )
    if request.args.dry_run:
        _show(table(plan, EVERYTHING if request.role == "learner" else SHOWN["rollout"]))
        _show(f"\n# {made.path}\n{made.text}")
        ssh.say(f"dry run: {request.config.arithmetic()}")
        return 0
    for path, text in ((made.config_path, request.text), (made.path, made.text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    ssh.say(f"wrote {made.path} and {made.config_path}; start it with: sbatch {made.path}")
    return 0


# ---- Kubernetes ---------------------------------------------------------------------------------------------


def _in_kubernetes(request: Request) -> int:
    config = request.config
    keys: dict[NodeRole, dict[str, str]] = {}
    if config.network.keys is not None:
        keys["learner"] = keys_for(config.network.keys, "learner", serves=True)
        keys["rollout"] = keys_for(config.network.keys, "rollout", serves=False)
        config = config_of(request.text, [f"network.keys={kubernetes.KEYS}"])
    plan = _plan(request, kubernetes.machines(config), python="python")
    made = kubernetes.manifests(
        config,
        request.role,
        image=request.args.image,
        claim=request.args.claim,
        keys=keys,
        replay=request.replay,
        folder=request.args.out,
        run_name=config.run.name + (time.strftime("-%Y%m%d-%H%M%S") if request.role == "learner" else ""),
    )
    if request.args.dry_run:
        _show(table(plan, EVERYTHING if request.role == "learner" else SHOWN["rollout"]))
        for name, text in made.files.items():
            _show(f"\n# {made.folder / name}\n{text}")
        for name in made.secrets:
            _show(f"# {made.folder / name}: a Secret with key files, not shown here; written with mode 0600")
        ssh.say(f"dry run: {config.arithmetic()}")
        return 0
    made.write()
    ssh.say(f"wrote {made.folder}; start it with: kubectl apply -f {made.folder}")
    return 0


def _plan(request: Request, machines: Mapping[str, Machine], python: str = sys.executable) -> Plan:
    """Every process with the configuration file that its node writes."""
    folder = f"{request.config.run_dir}/launch"
    parts = {
        role: assign(
            request.config,
            machines,
            config_file=f"{folder}/NODE-{role}.yaml",
            python=python,
            replay=request.replay,
            resume=request.args.resume is not None,
        )
        for role in SHOWN
    }
    processes = [
        replace(process, command=tuple(word.replace("/NODE-", f"/{process.node}-") for word in process.command))
        for role, plan in parts.items()
        for process in plan.processes
        if process.role in SHOWN[role]
    ]
    return replace(parts["learner"], processes=tuple(processes))


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
