"""`python -m scripts.launch.main learner|rollout --hosts FILE | --slurm | --kubernetes`: a run on several machines.

scripts/start_learner.sh and scripts/start_rollout_nodes.sh call it. `--dry-run` shows what would run where.
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
from replay.channel import KeysError
from scripts.launch import kubernetes, slurm, ssh
from scripts.launch.hosts import Host, HostsError, read_hosts
from scripts.launch.keys import keys_for
from scripts.launch.order import NodeRole, Order, config_of, hosts_of

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PORT = "5757"
SHOWN: dict[NodeRole, tuple[Role, ...]] = {"learner": ("replay", "learner"), "rollout": ("rollout",)}
EVERYTHING: tuple[Role, ...] = ("replay", "learner", "rollout")


@dataclass(frozen=True, slots=True)
class Wanted:
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
    args = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    try:
        wanted = _understand(args)
        if args.hosts is not None:
            return _over_ssh(wanted)
        if args.slurm:
            return _under_slurm(wanted)
        return _in_kubernetes(wanted)
    except (ConfigError, PlacementError, HostsError, KeysError) as error:
        ssh.say(f"refused: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m scripts.launch.main", description=__doc__)
    parser.add_argument("role", choices=["learner", "rollout"], help="which nodes to start")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--hosts", metavar="FILE", type=Path, help="over ssh: lines `name address [ssh=user@host] [gpus=8]`"
    )
    where.add_argument("--slurm", action="store_true", help="write a file for sbatch")
    where.add_argument("--kubernetes", action="store_true", help="write manifests of a JobSet")
    parser.add_argument("--dry-run", action="store_true", help="show what would run where; start and write nothing")
    parser.add_argument("--out", metavar="PATH", type=Path, help="where Slurm's file or Kubernetes' folder is written")
    parser.add_argument("--replay", help="address of replay (default: first learner node and network.replay_port)")
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on from the newest complete checkpoint of this run")
    parser.add_argument("--gpus-per-node", type=int, default=None, help="Slurm: GPUs of a node (default: as placed)")
    parser.add_argument(
        "--image", default="slipstream:latest", help="Kubernetes: container image (default: %(default)s)"
    )
    parser.add_argument(
        "--claim", default="slipstream", help="Kubernetes: PersistentVolumeClaim (default: %(default)s)"
    )
    add_arguments(parser)
    return parser


def _understand(args: argparse.Namespace) -> Wanted:
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
    overrides = ["placement.local_rollouts=false", "network.host=127.0.0.1"]
    if config.network.replay_port == 0:
        overrides.append(f"network.replay_port={os.environ.get('PORT', DEFAULT_PORT)}")
    config = config_of(dump(config), overrides)
    return Wanted(args, args.role, config, dump(config))


# ---- ssh ----------------------------------------------------------------------------------------------------


def _over_ssh(wanted: Wanted) -> int:
    hosts = hosts_of(wanted.config, read_hosts(wanted.args.hosts))
    for name, host in hosts.items():
        try:
            config_of(wanted.text, [f"network.host={host.address}"])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    plan = _plan(wanted, {name: host.machine() for name, host in hosts.items()})
    orders = [(_order(wanted, plan, name, hosts), hosts[name]) for name in plan.nodes(wanted.role)]
    if not wanted.args.dry_run:
        return ssh.run(orders, wanted.role, str(ROOT), sys.executable)
    _show(table(plan, SHOWN[wanted.role]))
    for order, host in orders:
        line = ssh.remote_line(order, str(ROOT), sys.executable)
        _show(f"\n{order.node}: {shlex.join([*ssh.ssh_command(), host.ssh, line])}")
        for name in sorted(order.keys):
            _show(f"  copies {wanted.config.network.keys}/{name} (mode 0600)")
    ssh.say(f"dry run: {wanted.config.arithmetic()}")
    return 0


def _order(wanted: Wanted, plan: Plan, node: str, hosts: Mapping[str, Host]) -> Order:
    return Order(
        role=wanted.role,
        node=node,
        config=wanted.text,
        hosts="".join(f"{host.name} {host.address}\n" for host in hosts.values()),
        replay=wanted.replay,
        resume=wanted.args.resume,
        overrides=overrides_of(wanted.args),
        # a rollout server beside replay finds the learner's keys there, and takes them
        keys=keys_for(wanted.config.network.keys, node, serves=node == plan.first_node),
    )


# ---- Slurm --------------------------------------------------------------------------------------------------


def _under_slurm(wanted: Wanted) -> int:
    plan = _plan(wanted, slurm.machines(wanted.config))
    made = slurm.sbatch(
        wanted.config,
        plan,
        wanted.role,
        root=ROOT,
        python=sys.executable,
        path=wanted.args.out,
        gpus=wanted.args.gpus_per_node,
    )
    if wanted.args.dry_run:
        _show(table(plan, EVERYTHING if wanted.role == "learner" else SHOWN["rollout"]))
        _show(f"\n# {made.path}\n{made.text}")
        ssh.say(f"dry run: {wanted.config.arithmetic()}")
        return 0
    for path, text in ((made.config_path, wanted.text), (made.path, made.text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    ssh.say(f"wrote {made.path} and {made.config_path}; start it with: sbatch {made.path}")
    return 0


# ---- Kubernetes ---------------------------------------------------------------------------------------------


def _in_kubernetes(wanted: Wanted) -> int:
    config = wanted.config
    keys: dict[NodeRole, dict[str, str]] = {}
    if config.network.keys is not None:
        keys["learner"] = keys_for(config.network.keys, "learner", serves=True)
        keys["rollout"] = keys_for(config.network.keys, "rollout", serves=False)
        config = config_of(wanted.text, [f"network.keys={kubernetes.KEYS}"])
    plan = _plan(wanted, kubernetes.machines(config), python="python")
    made = kubernetes.manifests(
        config,
        wanted.role,
        image=wanted.args.image,
        claim=wanted.args.claim,
        keys=keys,
        replay=wanted.replay,
        folder=wanted.args.out,
        run_name=f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}" if wanted.role == "learner" else config.run.name,
    )
    if wanted.args.dry_run:
        _show(table(plan, EVERYTHING if wanted.role == "learner" else SHOWN["rollout"]))
        for name, text in made.files.items():
            _show(f"\n# {made.folder / name}\n{text}")
        for name in made.secrets:
            _show(f"# {made.folder / name}: a Secret with key files, not shown here; written with mode 0600")
        ssh.say(f"dry run: {config.arithmetic()}")
        return 0
    made.write()
    ssh.say(f"wrote {made.folder}; start it with: kubectl apply -f {made.folder}")
    return 0


def _plan(wanted: Wanted, machines: Mapping[str, Machine], python: str = sys.executable) -> Plan:
    """Every process with the configuration file that its node writes."""
    folder = f"{wanted.config.run_dir}/launch"
    parts = {
        role: assign(
            wanted.config,
            machines,
            config_file=f"{folder}/NODE-{role}.yaml",
            python=python,
            replay=wanted.replay,
            resume=wanted.args.resume is not None,
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
