"""A file for `sbatch`, which runs `slipstream launch --srun` in its allocation. Meant to be read and edited."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.loading import digest_of, dump
from configs.placement import most_devices
from configs.schema import Config
from slipstream.launch.files.job_files import JobFiles
from slipstream.launch.node_spec import NodeRole
from slipstream.launch.reach.srun import STEP
from slipstream.plan.processes import Machine, Plan, uses_gpus

JOB = """#!/usr/bin/env bash
# {what} of run {name}. Written by slipstream/launch/files/slurm.py; edit it as you need.
#
#   sbatch {file} [--set a.b=c ...]
#   sbatch --array=0-3 {file}     a run for each index, with run.seed {seed} + index
#   sbatch {file} --set run.name={name}-JOB     goes on with the run of an earlier job
#
# Its configuration is the file below that is named by its digest, on every start: to change it, write a new job, or
# give --set, which Slurm keeps with the job.
# The repository, the model, the data and the run folder must be on a file system that all nodes see at the same path.
# The placement's nodes are the machines in Slurm's order, each with its own address: of SLIPSTREAM_INTERFACE, or else
# its first. One step of srun for each node and role starts its processes; `--dry-run` of the start script shows them.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output={folder}/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# The run goes on without a lost machine of rollout servers; below is what is done about the first machine.
#SBATCH --no-kill
# So many seconds before the limit of --time the run writes a checkpoint and ends, and the job is queued again.
#SBATCH --signal=B:USR2@120
# Add what your cluster asks for: --partition, --account, --time.
set -euo pipefail
cd {root}
{replay}
# A name that no other job has: all nodes agree on the run folder, and a requeued job finds it and resumes the run.
run_name={name}-${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
own=(--set "run.name=$run_name" --set "run.seed=$(({seed} + ${{SLURM_ARRAY_TASK_ID:-0}}))")
echo "slipstream: job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)): run {runs}/$run_name${{*:+ $*}}"
{guard}exec {python} -m slipstream.launch {side} --srun --config {config} --digest {digest}{forward} "${{own[@]}}" "$@"
"""
GUARD = """# A job that loses its first machine goes on without this script (--no-kill): the second queues it again.
srun {step} --nodelist="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)" bash -c 'while sleep 20; do
  job=$(scontrol --oneliner show job "$SLURM_JOB_ID") || continue
  [[ $job =~ \\ BatchHost=([^ ]+) ]] && first=${{BASH_REMATCH[1]}} || continue
  [[ $job =~ \\ NodeList=([^ ]+) ]] && left=$(scontrol show hostnames "${{BASH_REMATCH[1]}}") || continue
  grep -qx "$first" <<<"$left" || scontrol requeue "$SLURM_JOB_ID"
done' </dev/null >/dev/null 2>&1 &
"""
REPLAY = """export REPLAY="${REPLAY:?give the address of replay: sbatch --export=ALL,REPLAY=tcp://ADDRESS:PORT}"
"""


def machines(config: Config) -> dict[str, Machine]:
    """Nodes as far as they are known before Slurm has chosen machines."""
    return {share.node: Machine(f"address-of-{share.node}") for share in config.shares}


def files(
    config: Config, plan: Plan, role: NodeRole, *, path: Path | None, gpus: int | None, forward: Sequence[str] = ()
) -> JobFiles:
    """The file of a whole run (`learner`), or of rollout servers for a run elsewhere (`rollout`).

    Args:
        config: of the run.
        plan: its processes.
        role: of the start script.
        path: where the file is to lie; none takes the run folder.
        gpus: of a node; none takes the most that the placement uses on one.
        forward: names of variables for --forward-env; the job has their values from sbatch.
    """
    folder = Path(config.run_dir) / "launch"
    given = dump(config)
    shipped = folder / f"config-{digest_of(given)}.yaml"  # another job of this run's name has a file of its own
    target = path or folder / ("run.sbatch" if role == "learner" else "rollout.sbatch")
    shares = [share for share in config.shares if role == "learner" or share.devices("rollout")]
    on_gpus = any(uses_gpus(config, plan.machines[share.node]) for share in shares)
    count = gpus or max(map(most_devices, shares))
    text = JOB.format(
        what="The whole" if role == "learner" else "More rollout servers",
        name=config.run.name,
        seed=config.run.seed,
        runs=config.run.dir,
        file=target,
        nodes=len(shares),
        gpus=f"#SBATCH --gpus-per-node={count}\n" if on_gpus else "",
        folder=shlex.quote(str(folder)),
        root=shlex.quote(str(Path.cwd())),
        replay=REPLAY if role == "rollout" else "",
        guard=GUARD.format(step=shlex.join(STEP)) if len(shares) > 1 else "",
        python=shlex.quote(sys.executable),
        side="run" if role == "learner" else role,
        config=shlex.quote(str(shipped)),
        digest=digest_of(given),
        forward="".join(f" --forward-env {shlex.quote(name)}" for name in forward),
    )
    return JobFiles({shipped: given, target: text}, f"sbatch {target}")
