"""`python -m slipstream.launch run|learner|rollout`: a run or one side of it, on hosts that ssh or a scheduler reaches.

Without --hosts, --slurm, --srun, --ray or --kubernetes it is this host's: `run` and `learner` take the arguments of
`python -m learner.main`, `rollout` starts `--servers N` with the arguments of `python -m rollout_server.main`.
`--dry-run` shows what would run.
PORT (default 5757) is replay's port where network.replay_port is 0; REPLAY is its address for rollout servers.
"""

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.errors import BadHosts, BadOption
from configs.loading import add_arguments, digest_of, dump, from_arguments, overrides_of, parse
from configs.schema import Config
from learner.record import ledger
from slipstream.check.checks import REFUSALS, require_elsewhere
from slipstream.launch import earlier_run, fleet, here
from slipstream.launch.files import kubernetes, slurm
from slipstream.launch.files.job_files import JobFiles
from slipstream.launch.key_files import keys_for
from slipstream.launch.node_spec import ROLES, NodeRole, NodeSpec, config_of
from slipstream.launch.quickstart import input_is_missing
from slipstream.launch.reach import Reach, srun
from slipstream.launch.reach.commands import Ssh
from slipstream.launch.run_folder import new_job
from slipstream.launch.terminal import NearLimit, say
from slipstream.plan.processes import EVERYTHING, Machine, Plan, Process, Role, assign, table
from slipstream.runtime.lifeline import TRY_AGAIN
from slipstream.runtime.program import program
from slipstream.translate.refusals import AnsweringParser, refused

DEFAULT_PORT = "5757"
SIDES: dict[str, tuple[NodeRole, ...]] = {"run": ROLES, "learner": ("learner",), "rollout": ("rollout",)}
SHOWN: dict[NodeRole, tuple[Role, ...]] = {"learner": ("replay", "learner"), "rollout": ("rollout", "teacher")}


def main() -> int:
    """Entry point."""
    parser = _parser()
    args, unknown = parser.parse_known_args()
    port = os.environ.get("PORT", DEFAULT_PORT)
    if not (args.hosts or args.srun or args.ray or args.slurm or args.kubernetes):
        if sys.argv[1] != args.side:
            parser.error(f"{args.side!r} comes first: python -m slipstream.launch {args.side} ...")
        words = sys.argv[2:]
        if args.side == "rollout":
            return here.run_servers(words, port)
        here.become_learner(words, port if args.side == "learner" else None)
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    args.replay = args.replay or os.environ.get("REPLAY") or None
    try:
        config = _configuration(args, port)
        reach = _reach(args, config)
        if reach is not None:
            trained = ledger.last_step(config.run_dir)
            code = _on_hosts(args, config, reach)
            if code in (NearLimit.code, TRY_AGAIN) and args.srun:
                was_of_use = args.side == "rollout" or ledger.last_step(config.run_dir) > trained
                srun.requeue(os.environ[srun.JOB], config.run_dir, was_of_use=was_of_use)
            return code
        has_input = not (args.dry_run and input_is_missing(config, args.config))
        # a cluster's disk is shared, a claim is not seen here
        require_elsewhere(config, say, sees_files=args.slurm, has_input=has_input)
        return _with_files(args, *(_for_slurm(args, config) if args.slurm else _for_kubernetes(args, config)))
    except REFUSALS as error:
        say(refused(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = AnsweringParser(
        prog=program("slipstream.launch"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("side", choices=list(SIDES), help="both sides, or which one")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts", metavar="FILE", type=Path, help="over ssh: lines `name address [ssh=user@host] [gpus=8]`"
    )
    where.add_argument("--slurm", action="store_true", help="write a file for sbatch")
    where.add_argument("--srun", action="store_true", help="on the machines of this allocation of Slurm")
    where.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="auto",
        help="on the machines of a Ray cluster (default: the one that runs here)",
    )
    where.add_argument("--kubernetes", action="store_true", help="write manifests of a JobSet")
    add("--dry-run", action="store_true", help="show what would run where; start and write nothing")
    add("--out", metavar="PATH", type=Path, help="where Slurm's file or Kubernetes' folder is written")
    add("--replay", help="address of replay (default: first learner node and network.replay_port)")
    add("--resume", metavar="RUN_DIR", help="go on from the newest complete checkpoint of this run")
    add("--gpus-per-node", type=int, help="Slurm: GPUs of a node (default: as placed)")
    add(
        "--forward-env",
        metavar="NAME",
        action="append",
        default=[],
        help="a secret that every process gets (again for another); it is in no file, log or argument",
    )
    add("--digest", metavar="HEX", help="refuse another content of --config")
    add("--image", default="slipstream:latest", help="Kubernetes: container image (default: %(default)s)")
    add("--secret", metavar="NAME", help="Kubernetes: Secret that has the values of --forward-env by their names")
    add("--claim", default="slipstream", help="Kubernetes: PersistentVolumeClaim (default: %(default)s)")
    add_arguments(parser)
    return parser


def _reach(args: argparse.Namespace, config: Config) -> Reach | None:
    """The way to the hosts; none writes files for a scheduler. Raises ConfigError."""
    if args.hosts is not None:
        return Ssh(args.hosts)
    if args.ray is not None:
        from slipstream.launch.reach.ray import RayReach  # needs an extra, and says so

        return RayReach(args.ray)
    return srun.of_this_process(config) if args.srun else None


def _configuration(args: argparse.Namespace, port: str) -> Config:
    """What is shipped to every node."""
    if args.digest is not None and (now := digest_of(Path(args.config).read_text(encoding="utf-8"))) != args.digest:
        raise BadHosts(
            f"--config {args.config}: its digest is {now}, the job was written with {args.digest}, and every start of a"
            " job has one configuration; restore the file, or write a new job"
        )
    if args.resume is None:
        config = from_arguments(args)
        if config.placement.device == "auto" and config.placement.rollout is None:
            raise BadOption(
                "placement.device: 'auto' with placement.split would take the device of this machine for that of the"
                " run's; give --set placement.device=cuda, or cpu"
            )
    elif not (args.slurm or args.kubernetes):
        config = earlier_run.resumed(Path(args.resume), overrides_of(args))
    else:
        raise BadOption(
            "--resume: the files for Slurm and Kubernetes always begin a new run; give it to --hosts or --srun"
        )
    overrides = ["placement.local_rollouts=false", "network.host=127.0.0.1"]
    if config.network.replay_port == 0:
        overrides.append(f"network.replay_port={port}")
    return config_of(dump(config), overrides)


def _plan(args: argparse.Namespace, config: Config, machines: Mapping[str, Machine], python: str) -> Plan:
    """Every process with the configuration file that its node writes."""
    plan = assign(config, machines, config_file="", python=python, replay=args.replay, resume=args.resume is not None)

    def with_own_file(process: Process) -> Process:
        command, place = list(process.command), process.command.index("--config") + 1
        command[place] = f"{config.run_dir}/launch/{process.node}-{plan.side(process)}.yaml"
        return replace(process, command=tuple(command))

    return replace(plan, processes=tuple(map(with_own_file, plan.processes)))


def _on_hosts(args: argparse.Namespace, config: Config, reach: Reach) -> int:
    given, sides, job = forwarded(args.forward_env), SIDES[args.side], new_job()
    hosts = reach.hosts(config, only_rollouts=args.side == "rollout")
    for name, host in hosts.items():  # each will bind its own address
        parse(dump(config), name, [f"network.host={host.address}"])
    plan = _plan(args, config, {name: host.machine() for name, host in hosts.items()}, sys.executable)
    specs = [
        NodeSpec(
            role=role,
            node=node,
            config=dump(config),
            hosts="".join(f"{host.name} {host.address}\n" for host in hosts.values()),
            replay=args.replay,
            resume=args.resume,
            resume_if_begun=args.srun,
            job=job,
            # a rollout server beside replay finds the learner's keys there, and takes them
            keys={} if reach.shares_files else keys_for(config.network.keys, node, serves=node == plan.first_node),
            environment=given,
        )
        for role in sides
        for node in plan.nodes(role)
    ]
    if not args.dry_run:
        return fleet.run(reach, [(spec, hosts[spec.node]) for spec in specs], config)
    _show(table(plan, sum((SHOWN[role] for role in sides), ())))
    for spec in specs:
        _show(f"\n{spec.node}: {reach.shown(hosts[spec.node], fleet.words_of(spec))}")
        for name in sorted(spec.keys):
            _show(f"  copies {config.network.keys}/{name} (mode 0600)")
    say(f"dry run: {config.arithmetic()}")
    return 0


def forwarded(names: Sequence[str]) -> dict[str, str]:
    """Variables of this process that every node's processes get. Raises BadOption: one is not set."""
    if missing := [name for name in names if name not in os.environ]:
        raise BadOption(f"--forward-env {missing[0]}: it is not set here; export it, or leave the option out")
    return {name: os.environ[name] for name in names}


def _for_slurm(args: argparse.Namespace, config: Config) -> tuple[Config, Plan, JobFiles]:
    plan = _plan(args, config, slurm.machines(config), sys.executable)
    own = {"path": args.out, "gpus": args.gpus_per_node, "forward": args.forward_env}
    return config, plan, slurm.files(config, plan, _role(args), **own)


def _for_kubernetes(args: argparse.Namespace, config: Config) -> tuple[Config, Plan, JobFiles]:
    keys: dict[NodeRole, dict[str, str]] = {}
    if config.network.keys is not None:
        keys["learner"] = keys_for(config.network.keys, "learner", serves=True)
        keys["rollout"] = keys_for(config.network.keys, "rollout", serves=False)
        config = config_of(dump(config), [f"network.keys={kubernetes.KEYS}"])
    run_name = config.run.name + ("" if args.side == "rollout" else time.strftime("-%Y%m%d-%H%M%S"))
    if args.forward_env and args.secret is None:
        raise BadOption(
            "--forward-env: pods take values from a Secret, which is not named; give --secret NAME, and make it with"
            " `kubectl create secret generic NAME --from-env-file=FILE`"
        )
    more = (args.replay, run_name, args.secret, tuple(args.forward_env))
    pods = kubernetes.Pods(config, _role(args), args.image, args.claim, keys, *more)
    return config, _plan(args, config, kubernetes.machines(config), "python"), pods.files(args.out)


def _with_files(args: argparse.Namespace, config: Config, plan: Plan, files: JobFiles) -> int:
    """Write what a scheduler starts the run from, or show it."""
    if args.dry_run:
        _show(table(plan, SHOWN["rollout"] if args.side == "rollout" else EVERYTHING))
        for path, text in files.texts.items():
            _show(f"\n# {path}\n{text}")
        for path in files.secrets:
            _show(f"# {path}: a Secret with key files, not shown here; written with mode 0600")
        say(f"dry run: {config.arithmetic()}")
        return 0
    files.write()
    say(f"wrote {', '.join(map(str, [*files.texts, *files.secrets]))}; start the run with: {files.command}")
    return 0


def _role(args: argparse.Namespace) -> NodeRole:
    """Of files: those of the learner start the whole run."""
    return "rollout" if args.side == "rollout" else "learner"


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
