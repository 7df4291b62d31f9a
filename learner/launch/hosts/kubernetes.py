"""Manifests of a JobSet: a job of learner pods and a job of rollout pods for each number of GPUs that they need.

JobSet and not LeaderWorkerSet, because a training run ends: a JobSet succeeds when the learner's job does and then ends
the rollout pods; a LeaderWorkerSet keeps its groups running for ever. Pods have names in DNS that are known beforehand,
so replay's address and the rendezvous are, too.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from configs.loading import dump
from configs.plan import Machine
from configs.schema import Config
from learner.launch.hosts.node_spec import NodeRole

FILES = "/etc/slipstream"
KEYS = f"{FILES}/keys"
WORK = "/work"
MAX_NAME = 40
"""Pod names add role and numbers, and a label of DNS has 63 characters."""
ROLLOUT_RETRIES = 100
"""A rollout pod that fails is started again; above this the job fails, and all pods are made again."""
RESTARTS = 10
"""How often all pods are made again when a learner pod was lost (preempted, its node gone): the run resumes."""
REFUSED = 2
"""Exit code of a learner pod that another start would refuse as well."""

HEAD = """# Run {name} as a JobSet (https://jobset.sigs.k8s.io). Written by learner/launch/hosts/kubernetes.py.
#
#   kubectl apply -f {folder}
#
# Pods work in {work}, on the volume claim {claim}: model.path, data.train and run.dir are looked up from there.
# A pod that is made again resumes run folder {run_dir}; to begin another run, write these files again.
# The image {image} needs slipstream-rl{extra} installed. For RDMA add its device resource and, where the
# network needs it, hostNetwork; interfaces and NCCL's settings come from network.env.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Pods of one replicated job: nodes of one role with the same number of devices."""

    role: NodeRole
    name: str
    nodes: tuple[str, ...]
    devices: int


def groups(config: Config, role: NodeRole) -> list[Group]:
    """The replicated jobs of a role, in the order of the placement."""
    sizes = [(share.node, len(share.learner if role == "learner" else share.rollout)) for share in config.shares]
    parts = [list(part) for _, part in groupby([pair for pair in sizes if pair[1]], key=lambda pair: pair[1])]
    return [
        Group(role, role if len(parts) == 1 else f"{role}-{number}", tuple(node for node, _ in part), part[0][1])
        for number, part in enumerate(parts)
    ]


def jobset_name(config: Config) -> str:
    """The run's name as DNS takes it."""
    return re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:MAX_NAME].strip("-") or "run"


def machines(config: Config) -> dict[str, Machine]:
    """Nodes by the DNS names that their pods will have; of a node with both roles, that of the learner's pod."""
    jobset = jobset_name(config)
    return {
        node: Machine(f"{jobset}-{group.name}-0-{index}.{jobset}")
        for group in (*groups(config, "rollout"), *groups(config, "learner"))
        for index, node in enumerate(group.nodes)
    }


def host_file(config: Config) -> str:
    """The host file of the pods."""
    return "".join(f"{node} {machine.address}\n" for node, machine in machines(config).items())


@dataclass(frozen=True, slots=True)
class Manifests:
    """Files for `kubectl apply -f` by name; Secrets apart, since they are written for their owner alone."""

    folder: Path
    files: dict[str, str]
    secrets: dict[str, str]

    def write(self) -> None:
        """Write all files; a Secret for its owner alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        for name, text in self.secrets.items():
            (self.folder / name).unlink(missing_ok=True)
            with os.fdopen(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)


def manifests(
    config: Config,
    role: NodeRole,
    *,
    image: str,
    claim: str,
    keys: Mapping[NodeRole, Mapping[str, str]],
    replay: str | None,
    folder: Path | None,
    run_name: str,
) -> Manifests:
    """The manifests of a whole run (`learner`), or of rollout servers for a run elsewhere (`rollout`).

    Args:
        config: of the run.
        role: of the start script.
        image: of every container.
        claim: name of the PersistentVolumeClaim that pods work in.
        keys: key files of each role, by path inside network.keys.
        replay: address of replay, where it is not the first learner pod of this run.
        folder: where the files are to lie; none takes the run folder.
        run_name: of the run that the pods begin, or resume when its folder is there: no other manifest has it.
    """
    name = jobset_name(config) + ("-more" if role == "rollout" else "")
    roles: tuple[NodeRole, ...] = ("learner", "rollout") if role == "learner" else ("rollout",)
    folder = folder or Path(config.run_dir) / "launch" / ("kubernetes" if role == "learner" else "kubernetes-rollout")
    pods = _Pods(config, name, image, claim, keys, replay, run_name)
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": RESTARTS, "rules": [refused]} if role == "learner" else {"maxRestarts": 0},
        "replicatedJobs": [pods.job(group) for each in roles for group in groups(config, each)],
    }
    if role == "learner":
        learners = [group.name for group in groups(config, "learner")]
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": learners}
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}
    files = {"config.yaml": dump(config), "hosts": host_file(config)}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}, "data": files}
    extra = "[sglang]" if config.rollout.engine == "sglang" else ""
    run_dir = f"{config.run.dir}/{run_name}"
    head = HEAD.format(
        name=config.run.name, run_dir=run_dir, folder=folder, work=WORK, claim=claim, image=image, extra=extra
    )
    secrets = {
        f"keys-{each}.yaml": _yaml(_secret(f"{name}-keys-{each}", keys[each])) for each in roles if keys.get(each)
    }
    return Manifests(folder, {"jobset.yaml": head + _yaml(config_map) + "---\n" + _yaml(jobset)}, secrets)


@dataclass(frozen=True, slots=True)
class _Pods:
    config: Config
    jobset: str
    image: str
    claim: str
    keys: Mapping[NodeRole, Mapping[str, str]]
    replay: str | None
    run_name: str

    def job(self, group: Group) -> dict[str, Any]:
        count, is_learner = len(group.nodes), group.role == "learner"
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0 if is_learner else ROLLOUT_RETRIES,
            "template": {"spec": self._pod(group)},
        }
        if is_learner:
            codes = {"containerName": group.role, "operator": "In", "values": [REFUSED]}
            spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        return {"name": group.name, "replicas": 1, "template": {"spec": spec}}

    def _pod(self, group: Group) -> dict[str, Any]:
        files = {"name": "files", "configMap": {"name": f"{self.jobset}-files"}}
        mounts: list[dict[str, Any]] = [
            {"name": "work", "mountPath": WORK},
            {"name": "files", "mountPath": FILES},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        volumes: list[dict[str, Any]] = [
            {"name": "work", "persistentVolumeClaim": {"claimName": self.claim}},
            files,
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        if self.keys.get(group.role):
            items = [{"key": _flat(path), "path": path} for path in self.keys[group.role]]
            secret = {"secretName": f"{self.jobset}-keys-{group.role}", "defaultMode": 0o400, "items": items}
            volumes.append({"name": "keys", "secret": secret})
            mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        return {
            "restartPolicy": "Never" if group.role == "learner" else "OnFailure",
            "containers": [self._container(group, mounts)],
            "volumes": volumes,
        }

    def _container(self, group: Group, mounts: list[dict[str, Any]]) -> dict[str, Any]:
        spec = ["--role", group.role, "--node", ",".join(group.nodes)]
        spec += ["--hosts", f"{FILES}/hosts", "--config", f"{FILES}/config.yaml", "--renumber"]
        spec += ["--set", f"run.name={self.run_name}"]
        spec += ["--replay", self.replay] if self.replay is not None else []
        # of its pod: Kubernetes fills in $(X) in a command, and only a shell $X in a probe
        own = ["--index", "$(JOB_COMPLETION_INDEX)", "--host", "$(POD_IP)", "--resume-if-begun"]
        own_in_shell = '--index "$JOB_COMPLETION_INDEX" --host "$POD_IP"'
        probe = f"python -m learner.launch.hosts.ready {shlex.join(spec)} {own_in_shell}"
        container: dict[str, Any] = {
            "name": group.role,
            "image": self.image,
            "workingDir": WORK,
            "command": ["python", "-m", "learner.launch.hosts.node", *spec, *own],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *({"name": key, "value": value} for key, value in self.config.network.env.items()),
            ],
            "readinessProbe": {
                "exec": {"command": ["sh", "-c", probe]},
                "periodSeconds": 15,
                "timeoutSeconds": 10,
                "failureThreshold": 3,
            },
            "volumeMounts": mounts,
        }
        if group.role == "learner":
            container["ports"] = self._ports()
        if self.config.placement.device != "cpu":
            container["resources"] = {"limits": {"nvidia.com/gpu": group.devices}}
        return container

    def _ports(self) -> list[dict[str, Any]]:
        several = sum(1 for share in self.config.shares if share.learner) > 1
        named = {"replay": self.config.network.replay_port, "weight-bus": self.config.weight_bus.port}
        named |= {"rendezvous": self.config.placement.rendezvous_port} if several else {}
        return [{"name": name, "containerPort": port} for name, port in named.items() if port]


def _flat(path: str) -> str:
    """A path as a Secret takes it for a name."""
    return path.replace("/", ".")


def _secret(name: str, files: Mapping[str, str]) -> dict[str, Any]:
    data = {_flat(path): text for path, text in files.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "Opaque",
        "stringData": data,
    }


def _yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Several lines of text as a block, so that a configuration can be read."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
