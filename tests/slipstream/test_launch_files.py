"""The start commands' dry runs and what they write: four hosts over ssh, under Slurm and in Kubernetes."""

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import configs
from configs import ConfigError
from configs.loading import PRESETS, dump
from examples import sort6
from replay import keys as make_keys
from slipstream.launch import node, node_spec, ready
from slipstream.launch.__main__ import main
from slipstream.launch.files import kubernetes
from slipstream.launch.host_file import parse_hosts
from tests.learner.tiny_models import save_model

FOUR = "qwen3-14b-4nodes"
HOSTS = """# four hosts
node0 10.0.0.1 gpus=8 ssh=ubuntu@gpu0   # replay
node1 10.0.0.2 gpus=8
node2 10.0.0.3 gpus=8

node3 10.0.0.4
"""


@pytest.fixture
def launch(monkeypatch, capsys):
    """`python -m slipstream.launch` in this process; what it shows, or where it fails, what it says."""

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["slipstream.launch", *words])
        found, shown = main(), capsys.readouterr()
        assert found == code, shown.err
        return shown.out if code == 0 else shown.err

    return run


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys.make(folder, ["node1", "nodes"], force=False)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Model folder and prompts."""
    folder = tmp_path_factory.mktemp("files")
    save_model(folder, max_position_embeddings=16384)
    sort6.save_tokenizer(folder)
    (folder / "train.jsonl").write_text('{"prompt": "312=", "answer": "123"}\n')
    return folder


@pytest.fixture
def four(tmp_path, keys, files):
    """Arguments of a run on four hosts, with keys."""
    given = [f"network.keys={keys}", f"run.dir={tmp_path}/runs", f"model.path={files}"]
    given += [f"data.{one}={files}/train.jsonl" for one in ("train", "eval")]
    return ["--config", FOUR, *itertools.chain.from_iterable(("--set", one) for one in given)]


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "hosts").write_text(HOSTS)
    return ["--hosts", str(tmp_path / "hosts")]


def table_rows(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in text.split("\n\n")[0].splitlines()[1:]]


def test_a_dry_run_over_four_hosts_shows_what_would_run_where(tmp_path, launch, four, hosts):
    shown = launch("learner", *hosts, "--dry-run", *four)
    assert table_rows(shown) == [
        ["node0", "10.0.0.1", "replay", "-", "replay 29500"],
        ["node0", "10.0.0.1", "learner ranks 0-7", "0-7", "weight bus 29600, rendezvous 29400"],
        ["node1", "10.0.0.2", "learner ranks 8-15", "0-7", "-"],
    ]
    assert "ubuntu@gpu0 'cd " in shown and "-m slipstream.launch.node --stdin --role learner" in shown
    assert len(re.findall(r"-o ConnectTimeout=\d+ ", shown)) == 2, "a host that drops packets is named soon"
    of_node0, of_node1 = shown.split("ubuntu@gpu0 '")[1].split("\nnode1: ssh")
    assert "server.key_secret (mode 0600)" in of_node0 and "clients/learner.key_secret" in of_node0
    assert "clients/node1.key_secret" in of_node1 and "server.key_secret" not in of_node1

    shown = launch("rollout", *hosts, "--dry-run", *four)
    rows = [row[:4] for row in table_rows(shown)]
    assert rows[0] == ["node2", "10.0.0.3", "rollout-node2-0", "0-1"]
    assert rows[-1] == ["node3", "10.0.0.4", "rollout-node3-3", "6-7"] and len(rows) == 8
    assert "CUDA_VISIBLE_DEVICES=6,7" in shown and "clients/nodes.key_secret" in shown
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_a_secret_is_given_by_its_name_and_must_be_there(launch, four, hosts, monkeypatch):
    monkeypatch.setenv("CANARY", "hunter2")
    shown = launch("run", *hosts, "--dry-run", *four, "--forward-env", "CANARY")
    assert "hunter2" not in shown and [row[0] for row in table_rows(shown)].count("node3") == 4, "both sides"
    assert "--forward-env OTHER: it is not set here" in launch("run", *hosts, *four, "--forward-env", "OTHER", code=2)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.path=nowhere", "model.path: no folder 'nowhere'"),
        ("reward.function=mine.py:score", "mine.py"),
        ("learner.max_tokens_per_microbatch=2000000000", "learner.max_tokens_per_microbatch"),
    ],
)
@pytest.mark.parametrize("role", ["learner", "rollout"])
def test_what_would_stop_the_run_is_refused_before_job_files_are_written(tmp_path, launch, four, setting, said, role):
    for scheduler, out in (("--slurm", "job.sbatch"), ("--kubernetes", "manifests")):
        is_memory = "microbatch" in setting
        words = [role, scheduler, "--out", str(tmp_path / out), *four, "--set", setting]
        if scheduler == "--kubernetes" and not is_memory:  # may be on the claim, or in the image
            launch(*words)
            assert (tmp_path / out).is_dir()
        else:
            shown = launch(*words, code=2)
            assert said in shown and "not looked at from here: run-folder, journal, port" in shown
            assert not (tmp_path / out).exists()


def test_slurm(tmp_path, launch, four):
    launch("learner", "--slurm", "--forward-env", "WANDB_API_KEY", *four)
    file = tmp_path / "runs" / FOUR / "launch" / "run.sbatch"
    text = file.read_text()
    assert " --forward-env WANDB_API_KEY " in text
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert (options["nodes"], options["gpus-per-node"], options["ntasks-per-node"]) == ("4", "8", "1")
    (given,) = file.parent.glob("config-*.yaml")
    assert configs.load(given).placement == configs.load(FOUR).placement and f"--config {given} --digest" in text

    shown = launch("rollout", "--slurm", "--dry-run", *four)
    alone = shown[shown.index("#!/usr/bin/env bash") :]
    assert subprocess.run(["bash", "-n"], input=alone, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=2" in alone and "launch rollout --srun" in alone and 'export REPLAY="${REPLAY:?' in alone


SRUN = """#!/bin/bash
for word in "$@"; do case "$word" in --nodelist=*) machine="${word#*=}" ;; esac; done
while [[ "$1" == --* ]]; do shift; done
[[ "$1" == bash ]] && { echo "10.1.0.${machine#m}"; exit; }
read -r order; echo "$machine: $order" >>"$STEPS"
[[ "$*" == *"--node node0"* ]] && exit 7; [[ "$machine" == m3 ]] && exit 1; exit 0
"""


def run_job(folder, srun, *words, **variables):
    """Run the file for sbatch with commands in place of Slurm's, of which `scontrol` notes what it is asked for."""
    scontrol = """#!/bin/sh
echo "$@" >>"$STEPS.scontrol"; printf 'm1\nm2\nm3\nm4\n'
"""
    (folder / "bin").mkdir()
    for name, text in {"scontrol": scontrol, "srun": srun}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "m[1-4]", "SLURM_CPUS_ON_NODE": "8", **variables}
    slurm |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "STEPS": f"{folder}/steps"}
    command = ["bash", str(folder / "runs" / FOUR / "launch" / "run.sbatch"), *words]
    return subprocess.run(command, env=os.environ | slurm, capture_output=True, text=True, check=False, timeout=150)


def test_the_slurm_file_gives_every_node_its_order(tmp_path, launch, four):
    """With commands in place of Slurm's: a step reads its order, the first one fails, as does one with servers.

    The job was put back into the queue, and the file that it was written from has changed meanwhile.
    """
    own = tmp_path / "own.yaml"
    own.write_text(dump(configs.load(FOUR, ["learner.lr=3e-6"])))
    launch("learner", "--slurm", "--config", str(own), *four[2:])
    own.write_text(dump(configs.load(FOUR, ["learner.lr=0.5"])))
    done = run_job(tmp_path, SRUN, SLURM_RESTART_COUNT="1")
    assert done.returncode == 1 and "node0 (10.1.0.1) failed: exit code 7" in done.stderr, (done.stdout, done.stderr)
    steps = [line.partition(": ")[::2] for line in sorted((tmp_path / "steps").read_text().splitlines())]
    orders = {machine: node_spec.read_spec(text) for machine, text in steps}
    roles = ["learner", "learner", "rollout", "rollout"]
    found = {machine: (order.role, order.node) for machine, order in orders.items()}
    assert found == {f"m{i + 1}": (role, f"node{i}") for i, role in enumerate(roles)}
    first = orders["m1"]
    assert all(order.resume_if_begun and not order.keys and order.config == first.config for order in orders.values())
    config = node_spec.config_of(first.config)
    assert (config.run.name, config.learner.lr) == (f"{FOUR}-42", 3e-6)
    hosts = parse_hosts(first.hosts, "hosts")
    assert {host.name: host.address for host in hosts.values()} == {f"node{i}": f"10.1.0.{i + 1}" for i in range(4)}
    assert f"job 42, start 2: run {tmp_path}/runs/{FOUR}-42" in done.stdout


NOTICE = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
[[ "$1" == bash ]] && { echo "10.1.0.$RANDOM"; exit; }
read -r order
if [[ "$*" == *"--node node0"* ]]; then
  mkdir -p "$RUN"; printf %s "$LEDGER" >>"$RUN/ledger.jsonl"
  kill -USR2 $PPID
fi
while read -r line; do :; done; exit 130
"""


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_is_queued_again_before_its_limit_if_it_has_trained(tmp_path, launch, four, trains):
    """An element of an array: with a run and a seed of its own."""
    launch("learner", "--slurm", *four)
    run, line = tmp_path / "runs" / f"{FOUR}-40_2", '{"step": 1, "groups": [], "digest": "a"}\n' if trains else ""
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2", "RUN": str(run), "LEDGER": line}
    done = run_job(tmp_path, NOTICE, "--set", "learner.lr=0.5", **array)
    assert done.returncode == 140, done.stderr
    asked = (tmp_path / "steps.scontrol").read_text().splitlines()
    assert ("requeue 42" in asked) == trains and ("is not queued again" in done.stderr) != trains


def test_jobs_of_one_name_have_their_own_configurations(tmp_path, launch, four, monkeypatch):
    """Two jobs that are written before the first one starts, and a start after its file was edited."""
    given = {}
    for lr in ("1e-6", "2e-6"):
        launch("learner", "--slurm", *four, "--set", f"learner.lr={lr}")
        text = (tmp_path / "runs" / FOUR / "launch" / "run.sbatch").read_text()
        given[lr] = re.search(r"--config (\S+) --digest (\w+)", text).groups()
        launch("learner", "--kubernetes", "--out", str(tmp_path / lr), *four, "--set", f"learner.lr={lr}")
    assert {lr: configs.load(file).learner.lr for lr, (file, _) in given.items()} == {"1e-6": 1e-6, "2e-6": 2e-6}

    maps = [next(yaml.safe_load_all((tmp_path / lr / "jobset.yaml").read_text())) for lr in given]
    assert len({each["metadata"]["name"] for each in maps}) == 2 and all(each["immutable"] for each in maps)

    file, digest = given["1e-6"]
    Path(file).write_text(Path(file).read_text().replace("lr: 1.0e-06", "lr: 2.0e-06"))
    assert digest in launch("learner", "--srun", "--config", file, "--digest", digest, code=2)


def test_kubernetes(tmp_path, launch, four, monkeypatch):
    folder = tmp_path / "manifests"
    forwarded = ["--forward-env", "WANDB_API_KEY", "--secret", "trackers"]
    monkeypatch.setenv("WANDB_API_KEY", "canary-of-a-secret")
    launch("learner", "--kubernetes", "--out", str(folder), "--image", "registry/slip:1", *forwarded, *four)
    assert not any("canary-of-a-secret" in path.read_text() for path in folder.iterdir())
    refused = launch("learner", "--kubernetes", *forwarded[:2], *four, code=2)
    assert "--secret NAME" in refused
    config_map, jobset = yaml.safe_load_all((folder / "jobset.yaml").read_text())
    hosts = parse_hosts(config_map["data"]["hosts"], "hosts")
    assert hosts["node0"].address == f"{FOUR}-learner-0-0.{FOUR}"
    assert hosts["node3"].address == f"{FOUR}-rollout-0-1.{FOUR}"
    assert yaml.safe_load(config_map["data"]["config.yaml"])["network"]["keys"] == kubernetes.KEYS

    spec = jobset["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["learner"] and spec["network"]["subdomain"] == FOUR
    assert spec["failurePolicy"]["maxRestarts"] == kubernetes.RESTARTS
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    completions = {name: (job["completions"], job["completionMode"]) for name, job in jobs.items()}
    assert completions == dict.fromkeys(("learner", "rollout"), (2, "Indexed"))
    for role, job in jobs.items():
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/slip:1" and container["resources"]["limits"]["nvidia.com/gpu"] == 8
        options = dict(itertools.pairwise(container["command"]))
        assert container["command"][-1] == "--resume-if-begun"
        source = {"secretKeyRef": {"name": "trackers", "key": "WANDB_API_KEY"}}
        assert container["env"][-1] == {"name": "WANDB_API_KEY", "valueFrom": source}
        assert re.fullmatch(rf"run\.name={FOUR}-\d{{8}}-\d{{6}}", options["--set"])
        assert (options["--role"], options["--index"]) == (role, "$(JOB_COMPLETION_INDEX)")
        assert pod["terminationGracePeriodSeconds"] > node.PATIENCE_S
        probe = container["readinessProbe"]["exec"]["command"]
        assert options["--ready-file"] in probe[2] and "python" not in probe[2], "a probe starts no Python"
        assert {volume["name"] for volume in pod["volumes"]} == {each["name"] for each in container["volumeMounts"]}
        secret = yaml.safe_load((folder / f"keys-{role}.yaml").read_text())
        (volume,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys"]
        assert secret["metadata"]["name"] == volume["secretName"]
        assert {item["key"] for item in volume["items"]} == set(secret["stringData"])
        assert ("server.key_secret" in secret["stringData"]) == (role == "learner")
        assert (folder / f"keys-{role}.yaml").stat().st_mode & 0o777 == 0o600
    names = [kubernetes.jobset_name(configs.load("quickstart", [f"run.name={run}"])) for run in ("My_Run.7", "x" * 80)]
    assert names == ["my-run-7", "x" * 40], "names of DNS"


@pytest.fixture(params=["learner", "rollout"])
def objects(request, tmp_path, launch, four):
    """Every object of the manifests of a run, or of more rollout servers."""
    elsewhere = ["--replay", "tcp://10.0.0.1:5757"] if request.param == "rollout" else []
    secret = ["--forward-env", "WANDB_API_KEY", "--secret", "trackers"]
    launch(request.param, "--kubernetes", "--out", str(tmp_path / "manifests"), *elsewhere, *secret, *four)
    return [each for path in (tmp_path / "manifests").iterdir() for each in yaml.safe_load_all(path.read_text())]


def is_kept(written, found):
    """Whether all that was written is in what was found, which may have defaults beside it."""
    if isinstance(written, dict):
        return all(key in found and is_kept(value, found[key]) for key, value in written.items())
    if isinstance(written, list):
        return len(written) == len(found) and all(map(is_kept, written, found))
    return written == found


def test_the_manifests_have_the_form_that_jobset_publishes(objects):
    """Kubeflow's models are made of JobSet's and Kubernetes' own schemas; they drop a field that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    of = {"JobSet": models.JobsetV1alpha2JobSet, "ConfigMap": models.IoK8sApiCoreV1ConfigMap}
    of["Secret"] = models.IoK8sApiCoreV1Secret
    for each in objects:
        assert is_kept(each, of[each["kind"]].from_dict(each).to_dict()), each
    assert "JobSet" in {each["kind"] for each in objects}


def test_the_manifests_have_the_form_that_kubernetes_publishes(objects):
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in objects:
        if each["kind"] != "JobSet":
            validate(each, "1.37", strict=True)
            continue
        for job in each["spec"]["replicatedJobs"]:
            of_batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            validate({**of_batch, **job["template"]}, "1.37", strict=True)


def test_a_node_is_ready_while_its_processes_take_part(tmp_path, launch, four):
    """By replay's status; the probe then looks at the file alone, and at its age."""
    of_cpus = ("--set", "placement.device=cpu", "--set", "rollout.engine=sglang")
    launch("learner", "--kubernetes", "--out", str(tmp_path / "manifests"), *four, *of_cpus)
    config_map, _ = yaml.safe_load_all((tmp_path / "manifests" / "jobset.yaml").read_text())
    given, file = config_map["data"], tmp_path / "ready"

    def exit_code():
        return subprocess.run(ready.probe(str(file)), check=False).returncode

    def peers(role, names, version):
        return {"peers": [{"name": name, "role": role, "version": version} for name in names]}

    for role, node_name, names in (
        ("learner", "node1", [f"learner-{rank}" for rank in range(8, 16)]),
        ("rollout", "node2", [f"rollout-node2-{index}" for index in range(4)]),
    ):
        spec = node_spec.NodeSpec(role=role, node=node_name, config=given["config.yaml"], hosts=given["hosts"])
        assignment = node_spec.resolve(spec, host="10.0.0.9", renumber=True, write=False)
        cases = {(): names, tuple(names[:-1]): names[-1:], tuple(names): []}
        for present, missing in cases.items():
            absent = ready.absent(assignment, peers(role, present, 3 if role == "rollout" else None))
            assert absent == missing
            ready.note(file, absent)
            assert exit_code() == bool(missing)
    assert ready.absent(assignment, peers("rollout", names, None)) == names, "servers without proven weights"
    assert ready.absent(assignment, {}) == names, "replay does not answer"
    os.utime(file, (time.time() - 90,) * 2)
    assert exit_code() == 1, "the node's process stands still"


def test_a_dry_run_shows_no_secret(launch, four, keys):
    shown = launch("learner", "--kubernetes", "--dry-run", *four)
    secrets = [re.search(r'secret-key = "(.*)"', path.read_text()) for path in keys.rglob("*.key_secret")]
    assert secrets and all(found and found[1] not in shown for found in secrets)
    assert "a Secret with key files, not shown here" in shown


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_every_preset_dry_runs(name, tmp_path, launch):
    config = configs.load(name)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{share.node} 10.0.0.{i + 1} gpus=8\n" for i, share in enumerate(config.shares)))
    arguments = ["--hosts", str(hosts), "--dry-run", "--config", name, "--set", "network.insecure=true"]
    rows = [row for role in ("learner", "rollout") for row in table_rows(launch(role, *arguments))]
    assert sum(row[2].startswith("rollout") for row in rows) == config.num_rollout_servers
    assert sum(row[2].startswith("learner") for row in rows) == len(config.learner_nodes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node0\n", ["hosts, line 1", "'node0'", "name address"]),
        ("# a\n\nnode0 10.0.0.1 gpu=8\n", ["hosts, line 3", "'gpu=8'", "gpus=8"]),
        ("node0 10.0.0.1 gpus=many\n", ["line 1", "gpus='many'"]),
        ("node0 10.0.0.1\nnode0 10.0.0.2\n", ["line 2", "'node0' is there already"]),
        ("node0 10.0.0.1\nnode1 10.0.0.1\n", ["line 2", "'10.0.0.1'", "'node0'"]),
        ("node0 10.0.0.1 ssh=-oProxyCommand=x\n", ["line 1", "ssh="]),
        ("node/0 10.0.0.1\n", ["line 1", "'node/0' is no name"]),
        ("\n", ["no host"]),
    ],
)
def test_a_bad_host_file_is_refused_with_its_line(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, "hosts")
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("node0 10.0.0.1\n", [], ["node1", "not in the host file", "add a line"]),
        (HOSTS.replace("gpus=8 ssh", "gpus=4 ssh"), [], ["node0:7", "needs 8 GPUs", "node0 has 4"]),
        (HOSTS, ["network.keys=null"], ["node0", "network.host", "10.0.0.1", "network.keys"]),
        (HOSTS, ["network.keys=no/such/keys"], ["no/such/keys", "replay.keys"]),
    ],
)
def test_what_cannot_start_is_refused_before_anything_does(tmp_path, launch, four, hosts, text, settings, words):
    (tmp_path / "hosts").write_text(text)
    said = launch("learner", *hosts, *four, *[word for setting in settings for word in ("--set", setting)], code=2)
    assert said.startswith("slipstream: refused: ") and [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("where", [["--slurm"], ["--kubernetes"], ["--hosts", "hosts"]])
def test_the_device_of_another_machine_is_not_that_of_this_one(where, launch):
    said = launch("learner", *where, "--dry-run", "--set", "placement.device=auto", code=2)
    assert "refused: placement.device: 'auto'" in said
