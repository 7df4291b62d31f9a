"""A file for `sbatch`: one allocation, one srun step for each node and role. Meant to be read and edited."""

import shlex
import sys
from pathlib import Path

from configs.loading import digest_of, dump
from configs.placement import most_devices
from configs.schema import Config
from slipstream.launch.hosts.job_files import JobFiles
from slipstream.launch.hosts.node_spec import ROLES, NodeRole
from slipstream.plan.processes import Machine, Plan, uses_gpus

STEP = ("--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none")
"""Arguments of srun for one process on one machine, beside other steps there."""
ADDRESS = """if [[ -n "${SLIPSTREAM_INTERFACE:-}" ]]; then
      ip -4 -o addr show dev "$SLIPSTREAM_INTERFACE" | awk "{split(\\$4, a, \\"/\\"); print a[1]; exit}"
    else hostname -I | cut -d" " -f1; fi"""
"""For bash, in single quotes."""
HEAD = """#!/usr/bin/env bash
# {what} of run {name}. Written by slipstream/launch/hosts/slurm.py; edit it as you need.
#
#   sbatch {file}
#
# Its configuration is the file below that is named by its digest, on every start: to change it, write a new job.
# The repository, the model, the data and the run folder must be on a file system that all nodes see at the same path.
# Every step runs slipstream.launch.hosts.node, which starts its node's processes with GPUs, ports and environment;
# `--dry-run` of the start script shows them.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output={folder}/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Add what your cluster asks for: --partition, --account, --time.
set -euo pipefail
cd {root}

# The placement's nodes, in the order of the machines that Slurm gives.
nodes=({names})
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# One step on one machine. Steps share it (--overlap), and each sees all of its cores and GPUs.
on() {{
  srun {step} --nodelist="$1" --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    {step_gpus}"${{@:2}}"
}}

# Each machine's own address, of SLIPSTREAM_INTERFACE or else its first: what its sockets bind.
address_of() {{
  on "$1" bash -c '{address}'
}}
hosts={folder}/hosts-$SLURM_JOB_ID
for i in "${{!nodes[@]}}"; do
  address=$(address_of "${{machines[i]}}")
  if [[ -z "$address" ]]; then
    echo "slipstream: ${{machines[i]}} shows no address; set SLIPSTREAM_INTERFACE to the interface of its network" >&2
    exit 1
  fi
  echo "${{nodes[i]}} $address"
done >"$hosts"
{others}declare -A machine_of
for i in "${{!nodes[@]}}"; do machine_of[${{nodes[i]}}]=${{machines[i]}}; done

# A name that no other job has: all nodes agree on the run folder, and a requeued job finds it and resumes the run.
run_name={name}-$SLURM_JOB_ID
echo "slipstream: job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)): run {runs}/$run_name"
step() {{ # ROLE NODE [ARGUMENT ...]
  on "${{machine_of[$2]}}" {python} -m slipstream.launch.hosts.node --role "$1" --node "$2" --hosts "$hosts" \\
    --config {config} --digest {digest} --set "run.name=$run_name" --resume-if-begun "${{@:3}}" &
  pids+=($!)
}}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true; wait || true' EXIT
"""

LEARNER_END = """
# Replay and rank 0 are in the first step: its end is the end of the run. The others leave by themselves.
status=0
wait "${pids[0]}" || status=$?
for ((i = 0; i < 60; i++)); do
  [[ -z "$(jobs -rp)" ]] && break
  sleep 1
done
exit "$status"
"""

ROLLOUT_END = """
# Every server ends with the run.
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""


def machines(config: Config) -> dict[str, Machine]:
    """Nodes as far as they are known before Slurm has chosen machines."""
    return {share.node: Machine(f"address-of-{share.node}") for share in config.shares}


def files(config: Config, plan: Plan, role: NodeRole, *, path: Path | None, gpus: int | None) -> JobFiles:
    """The file of a whole run (`learner`), or of rollout servers for a run elsewhere (`rollout`).

    Args:
        config: of the run.
        plan: its processes.
        role: of the start script.
        path: where the file is to lie; none takes the run folder.
        gpus: of a node; none takes the most that the placement uses on one.
    """
    folder = Path(config.run_dir) / "launch"
    given = dump(config)
    shipped = folder / f"config-{digest_of(given)}.yaml"  # another job of this run's name has a file of its own
    target = path or folder / ("run.sbatch" if role == "learner" else "rollout.sbatch")
    names = [share.node for share in config.shares if role == "learner" or share.devices("rollout")]
    elsewhere = [share.node for share in config.shares if share.node not in names]
    on_gpus = any(uses_gpus(config, plan.machines[name]) for name in names)
    count = gpus or max(most_devices(share) for share in config.shares if share.node in names)
    text = HEAD.format(
        step=" ".join(STEP),
        address=ADDRESS,
        what="The whole" if role == "learner" else "More rollout servers",
        name=config.run.name,
        runs=config.run.dir,
        file=target,
        nodes=len(names),
        gpus=f"#SBATCH --gpus-per-node={count}\n" if on_gpus else "",
        step_gpus=f"--gpus-per-node={count} " if on_gpus else "",
        folder=shlex.quote(str(folder)),
        root=shlex.quote(str(Path.cwd())),
        names=" ".join(names),
        others="".join(f'echo "{node} elsewhere-{node}" >>"$hosts"\n' for node in elsewhere),
        python=shlex.quote(sys.executable),
        config=shlex.quote(str(shipped)),
        digest=digest_of(given),
    )
    if role == "learner":
        steps = [f"step {each} {node}" for each in ROLES for node in plan.nodes(each)]
    else:
        steps = [': "${REPLAY:?give the address of replay: sbatch --export=ALL,REPLAY=tcp://ADDRESS:PORT}"']
        steps += [f'step rollout {node} --replay "$REPLAY"' for node in names]
    text += "\n" + "\n".join(steps) + "\n" + (LEARNER_END if role == "learner" else ROLLOUT_END)
    return JobFiles({shipped: given, target: text}, f"sbatch {target}")
