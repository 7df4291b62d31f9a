"""One image for both roles: the quick start in it, and the pods of its manifests with what a kubelet does to them."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from replay import keys as make_keys
from slipstream.launch.files.kubernetes import GRACE_S
from tests.support.image import build, exec_in, pod, process_1
from tests.support.namespaces import Switch, switched
from tests.support.runs import Run, patient_reward, untrained_input
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
NODES = {"node0": "10.0.0.1", "node1": "10.0.0.2"}
PATIENT_S = 240.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    with switched(NODES) as made:
        yield made


class Pods:
    """The containers of a JobSet's manifests, one of each role."""

    def __init__(self, root: Path, switch: Switch, folder: Path) -> None:
        self.root, self.switch, self.folder = root, switch, folder
        self.work = folder / "work"
        self.started: list[subprocess.Popen[str]] = []
        input_ = untrained_input(self.work / "data")
        settings = [setting.replace(str(self.work), "/work") for setting in input_.settings]
        patient_reward(self.work, Path("/work/go_on"), pause_s=0.1)
        settings[-1] = "reward.function=patient.py:reward"
        make_keys.make(self.work / "keys", ["nodes"], force=False)
        (folder / "names").write_text("127.0.0.1 localhost\n")
        settings += ["run.name=tiny", "network.keys=keys", "learner.total_steps=60", "rollout.groups_per_step=8"]
        settings += ["placement.device=cpu", "placement.split=null", "checkpoint.every_steps=1000"]
        settings += ["placement.learner=node0:0", "placement.rollout=node1:0", "evaluation.every_steps=0"]
        settings += ["tracking.plot=false", "weight_bus.collective_timeout_s=20", "weight_bus.deadline_s=60"]
        words = [word for setting in settings for word in ("--set", setting)]
        command = ["slipstream", "launch", "run", "--kubernetes", "--out", "manifests", *words]
        made = self.start("node0", command, folder)
        assert made.wait(120) == 0, made.communicate()[0]
        config_map, jobset = yaml.safe_load_all((self.work / "manifests/jobset.yaml").read_text())
        for name, text in config_map["data"].items():
            (folder / name).write_text(text)
        names = {line.split()[0]: line.split()[1] for line in config_map["data"]["hosts"].splitlines()}
        hosts = "".join(f"{address} {names[node]}\n" for node, address in NODES.items())
        (folder / "names").write_text(f"127.0.0.1 localhost\n{hosts}")
        jobs = jobset["spec"]["replicatedJobs"]
        self.pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
        for role in self.pods:
            secret = yaml.safe_load((self.work / f"manifests/keys-{role}.yaml").read_text())
            volumes = {volume["name"]: volume for volume in self.pods[role]["volumes"]}
            for item in volumes["keys"]["secret"]["items"]:
                path = folder / role / "keys" / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(secret["stringData"][item["key"]])
                path.chmod(0o400)
            for name in config_map["data"]:
                (folder / role / name).write_text(config_map["data"][name])

    def start(self, node: str, command: list[str], files: Path, **variables: str) -> "subprocess.Popen[str]":
        mounts = {"work": self.work, "files": files, "names": self.folder / "names"}
        self.started.append(pod(self.root, self.switch, node, command, variables, **mounts))
        return self.started[-1]

    def of(self, role: str) -> "subprocess.Popen[str]":
        """Start the pod of this role, as the kubelet would."""
        (container,) = self.pods[role]["containers"]
        node = "node0" if role == "learner" else "node1"
        own = {"$(JOB_COMPLETION_INDEX)": "0", "$(POD_IP)": NODES[node]}
        return self.start(node, [own.get(word, word) for word in container["command"]], self.folder / role)

    def is_ready(self, role: str, started: "subprocess.Popen[str]") -> bool:
        (container,) = self.pods[role]["containers"]
        return exec_in(started, container["readinessProbe"]["exec"]["command"]) == 0

    def run(self) -> Run:
        (folder,) = [path.parent for path in (self.work / "runs").glob("tiny-*/config.yaml")]
        return Run(self.started[-1], folder, self.folder / "none")

    def close(self) -> None:
        for each in self.started:
            if each.poll() is None:
                process_1(each).kill()
            each.wait(30)


@pytest.fixture
def pods(root: Path, switch: Switch, tmp_path: Path) -> Iterator[Pods]:
    made = Pods(root, switch, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_the_quick_start_runs_in_the_image(root: Path, switch: Switch, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("127.0.0.1 localhost\n")
    command = ["bash", "/opt/slipstream/scripts/quickstart.sh", "--set", "learner.total_steps=4"]
    mounts = {"work": tmp_path, "files": tmp_path, "names": tmp_path / "names"}
    said, _ = pod(root, switch, "node0", command, {}, **mounts).communicate(timeout=600)
    assert json.loads(said.splitlines()[-1])["digests_equal"] is True, said[-3000:]


def test_pods_are_ended_in_order_and_made_again(pods: Pods) -> None:
    """A rollout pod that is drained hands its leases back, a learner pod writes a checkpoint; both come back."""
    rollout, learner = pods.of("rollout"), pods.of("learner")
    until(lambda: any((pods.work / "runs").glob("tiny-*/config.yaml")), "the run folder", PATIENT_S)
    run = pods.run()
    until(lambda: len(run.steps()) > 2, "step 3", PATIENT_S)
    for role, started in (("rollout", rollout), ("learner", learner)):
        until(lambda role=role, started=started: pods.is_ready(role, started), f"{role} ready", PATIENT_S)
        assert process_1(started).cmdline()[1:3] == ["-m", "slipstream.launch.node"], "process 1"

    process_1(rollout).send_signal(signal.SIGTERM)
    said, _ = rollout.communicate(timeout=GRACE_S)
    assert rollout.returncode == 130 and "leases are handed back to replay" in said, said
    second = pods.of("rollout")
    before = len(run.steps())
    until(lambda: len(run.steps()) > before + 1, "steps with the new pod", PATIENT_S)

    (pods.work / "go_on").touch()
    process_1(learner).send_signal(signal.SIGTERM)
    said, _ = learner.communicate(timeout=GRACE_S)
    assert learner.returncode == 130 and list(run.folder.glob("checkpoints/step_*/COMPLETE")), said
    said, _ = second.communicate(timeout=GRACE_S)
    assert second.returncode not in (None, 0), f"else its job would take it for done: {said}"
    pods.of("rollout")
    said, _ = pods.of("learner").communicate(timeout=PATIENT_S)
    assert "resumes it from its journal and newest checkpoint" in said and pods.started[-1].returncode == 0, said
    assert [row["training/global_step"] for row in run.steps()] == [*range(1, 61)]
