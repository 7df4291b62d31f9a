#!/usr/bin/env bash
# The main job on one CPU machine: installs what is needed into .venv, makes a tiny model and its prompts,
# trains it through replay, a rollout server and two learner ranks, and prints one line of JSON.
#
#   bash scripts/quickstart.sh [--real] [--seed N] [--set a.b=c ...]
#
# The run is in runs/quickstart; of a seed other than 0 in runs/quickstart-seedN, and a second one in runs/quickstart-2.
# --real trains a real chat model in its place, SmolLM2-135M-Instruct, on sums: configs/smollm2-cpu.yaml, about a quarter
# of an hour on two cores, longer and in float32 where they have no products of bfloat16. The model comes from a package
# (89 MiB), the sums from another one (extra `recipes`).
# With --set rollout.engine=sglang it also installs SGLang, and evaluates every 20 steps where it was every 5: on a CPU
# SGLang samples several times slower than the embedded engine, and evaluations were a third of all samples.
set -euo pipefail
cd "$(dirname "$0")/.."

refuse() { echo "quickstart.sh: $*" >&2; exit 2; }

seed=0
engine=torch
real=
overrides=()
while (($#)); do
  if [[ "$1" == --seed || "$1" == --set ]] && (($# < 2)); then refuse "$1 needs a value: --seed N, --set a.b=c"; fi
  case "$1" in
    --real) real=yes; shift ;;
    --seed)
      if [[ ! "$2" =~ ^[0-9]+$ ]]; then refuse "--seed '$2' is no whole number from 0 on"; fi
      seed="$2"
      shift 2
      ;;
    --set)
      case "$2" in
        rollout.engine=*) engine="${2#*=}" ;;
        run.name=* | run.dir=*)
          refuse "--set $2: this script chooses the run folder, runs/quickstart or the next free name; leave it out, or" \
            "install with 'bash scripts/install.sh --venv .venv none' and run '.venv/bin/python -m learner.main --set $2'"
          ;;
      esac
      overrides+=(--set "$2")
      shift 2
      ;;
    -h | --help) sed -n '2,12p' "$0"; exit 0 ;;
    *) refuse "unknown argument '$1' (there are --real, --seed N and --set a.b=c)" ;;
  esac
done

if [[ -n "${SLIPSTREAM_PYTHON:-}" ]]; then
  python="$SLIPSTREAM_PYTHON"
else
  bash scripts/install.sh --venv .venv "$([[ -z "$real" ]] && echo none || echo recipes)"
  python=.venv/bin/python
  if [[ "$engine" == sglang ]]; then
    device=$("$python" -c 'import torch; print(torch.version.cuda or torch.version.hip or "")')
    bash scripts/install.sh --venv .venv "$([[ -z "$device" ]] && echo sglang-cpu || echo sglang)"
  fi
fi
export OMP_NUM_THREADS=1

if [[ -n "$real" ]]; then
  config=smollm2-cpu
  if [[ "$engine" == sglang ]]; then config=smollm2-cpu-sglang; fi
  data=data/chain_sum
  "$python" -m scripts.get_smollm2 --out models/SmolLM2-135M-Instruct
  "$python" -m scripts.make_rows chain_sum --out "$data" --options "min_terms=2&max_terms=2&max_digits=2" --eval-prompts 256
  settings=(--config "$config")
  slow=$("$python" -c 'from configs.machine import multiplies_bfloat16 as has; print("bfloat16" if has() is False else "")')
  if [[ -n "$slow" && "$engine" != sglang ]]; then
    echo "quickstart.sh: this processor has no products of $slow: float32 in its place" >&2
    settings+=(--set rollout.dtype=float32 --set learner.compute_dtype=float32)
  fi
else
  config=quickstart
  data="data/sort6-seed$seed"
  "$python" -m examples.sort6 --out "$data" --seed "$seed"
  settings=(--async-lag 1 --set "model.path=$data/model")
  settings+=(--set "data.train=$data/train.jsonl" --set "data.eval=$data/eval.jsonl")
  if [[ "$engine" == sglang ]]; then settings+=(--set evaluation.every_steps=20); fi
fi
# runs/quickstart, or the next free name: making the folder claims it
name="$config"
if [[ "$seed" != 0 ]]; then name="$config-seed$seed"; fi
base="$name" number=2
mkdir -p runs
until mkdir "runs/$name" 2>/dev/null; do
  if [[ ! -d "runs/$name" ]]; then echo "quickstart.sh: runs/$name cannot be made" >&2; exit 1; fi
  name="$base-$((number++))"
done
started=$(date +%s.%N)
code=0
"$python" -m learner.main "${settings[@]}" --seed "$seed" --name "$name" "${overrides[@]}" || code=$?
if ((code)); then
  rmdir "runs/$name" 2>/dev/null || true # a run that was refused leaves it empty: the next one has its name
  exit "$code"
fi
seconds=$("$python" -c "import time; print(time.time() - $started)")
"$python" -m learner.record.summary "runs/$name" --train-seconds "$seconds"
