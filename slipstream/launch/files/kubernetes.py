"""Manifests of a JobSet: a job of learner pods and a job of rollout pods for each number of GPUs that they need.

JobSet and not LeaderWorkerSet, because a training run ends: a JobSet succeeds when the learner's job does and then ends
the rollout pods; a LeaderWorkerSet keeps its groups running for ever. Pods have names in DNS that are known beforehand,
so replay's address and the rendezvous are, too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from configs.loading import digest_of, dump
from configs.schema import Config
from slipstream.launch import ready
from slipstream.launch.files.job_files import JobFiles
from slipstream.launch.node_spec import ROLES, NodeRole
from slipstream.plan.processes import Machine
from slipstream.runtime.lifeline import CANNOT_GO_ON, RUN_FAILED

FILES = "/etc/slipstream"
KEYS = f"{FILES}/keys"
WORK = "/work"
READY = "/tmp/slipstream-ready"
GRACE_S = 60
"""After SIGTERM: rollout servers hand leases back within 10 s, a learner's node ends within node.PATIENCE_S, 30 s."""
MAX_NAME = 40
"""Pod names add role and numbers, and a label of DNS has 63 characters."""
RETRIES: Mapping[NodeRole, int] = {"learner": 20, "rollout": 100}
"""A pod that fails is made again alone, and a learner pod resumes the run; above this its job fails."""
RESTARTS = 3
"""How often all pods are made again when a job has failed so."""

HEAD = """# Run {name} as a JobSet (https://jobset.sigs.k8s.io). Written by slipstream/launch/files/kubernetes.py.
#
#   kubectl apply -f {folder}
#
# Pods work in {work}, on the volume claim {claim}: model.path, data.train and run.dir are looked up from there.
# A pod that is made again resumes run folder {run_dir}; to begin another run, write these files again.
# The image {image} needs slipstream-rl{extra} installed. For RDMA add its device resource and, where the
# network needs it, hostNetwork; interfaces and NCCL's settings come from network.env.
"""


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods of one replicated job: nodes of one role with the same number of devices."""

    role: NodeRole
    name: str
    nodes: tuple[str, ...]
    devices: int


def groups(config: Config, role: NodeRole) -> list[PodGroup]:
    """The replicated jobs of a role, in the order of the placement."""
    sizes = [(share.node, len(share.devices(role))) for share in config.shares]
    parts = [list(part) for _, part in groupby([pair for pair in sizes if pair[1]], key=lambda pair: pair[1])]
    return [
        PodGroup(role, role if len(parts) == 1 else f"{role}-{number}", tuple(node for node, _ in part), part[0][1])
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


@dataclass(frozen=True, slots=True)
class Pods:
    """A whole run (`role` learner), or rollout servers for a run elsewhere (rollout)."""

    config: Config
    role: NodeRole
    image: str
    """Of every container."""
    claim: str
    """Name of the PersistentVolumeClaim that pods work in."""
    keys: Mapping[NodeRole, Mapping[str, str]]
    """Key files of each role, by path inside network.keys."""
    replay: str | None
    """Address of replay, where it is not the first learner pod of this run."""
    run_name: str
    """Of the run that the pods begin, or resume when its folder is there: no other manifest has it."""
    secret: str | None = None
    """Name of the Secret with the values of `forward`."""
    forward: tuple[str, ...] = ()
    """Names of the variables that every process gets from it."""

    @property
    def name(self) -> str:
        """Of the JobSet."""
        return jobset_name(self.config) + ("-more" if self.role == "rollout" else "")

    @property
    def config_map(self) -> str:
        """Name of the files' ConfigMap, which cannot be changed; that of another configuration has another one."""
        return f"{self.name}-files-{digest_of(dump(self.config))}"

    def files(self, folder: Path | None) -> JobFiles:
        """The manifests; no folder takes the run folder."""
        config, run = self.config, self.config.run
        roles: tuple[NodeRole, ...] = ROLES if self.role == "learner" else ("rollout",)
        default = "kubernetes" if self.role == "learner" else "kubernetes-rollout"
        folder = folder or Path(config.run_dir) / "launch" / default
        hosts = "".join(f"{node} {machine.address}\n" for node, machine in machines(config).items())
        data = {"config.yaml": dump(config), "hosts": hosts}
        metadata = {"name": self.config_map}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": data}
        extra = f"[{package}]" if (package := config.rollout.facts.package) else ""
        names = {"name": run.name, "run_dir": f"{run.dir}/{self.run_name}", "folder": folder, "work": WORK}
        head = HEAD.format(**names, claim=self.claim, image=self.image, extra=extra)
        jobset = head + _yaml(config_map) + "---\n" + _yaml(self._jobset(roles))
        secrets = {folder / f"keys-{each}.yaml": self._secret(each) for each in roles if self.keys.get(each)}
        return JobFiles({folder / "jobset.yaml": jobset}, f"kubectl apply -f {folder}", secrets)

    def _jobset(self, roles: tuple[NodeRole, ...]) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [self._job(group) for each in roles for group in groups(self.config, each)],
        }
        if self.role == "learner":
            refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
            spec["failurePolicy"] = {"maxRestarts": RESTARTS, "rules": [refused]}
            learners = [group.name for group in groups(self.config, "learner")]
            spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": learners}
        kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return {**kind, "metadata": {"name": self.name}, "spec": spec}

    def _job(self, group: PodGroup) -> dict[str, Any]:
        count, is_learner = len(group.nodes), group.role == "learner"
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": RETRIES[group.role],
            "template": {"spec": self._pod(group)},
        }
        if is_learner:
            codes = {"containerName": group.role, "operator": "In", "values": [CANNOT_GO_ON, RUN_FAILED]}
            drained = {"type": "DisruptionTarget", "status": "True"}  # preempted, or evicted from its node
            rules = [{"action": "FailJob", "onExitCodes": codes}, {"action": "Ignore", "onPodConditions": [drained]}]
            spec["podFailurePolicy"] = {"rules": rules}
        return {"name": group.name, "replicas": 1, "template": {"spec": spec}}

    def _pod(self, group: PodGroup) -> dict[str, Any]:
        volumes: list[tuple[str, str, dict[str, Any]]] = [
            ("work", WORK, {"persistentVolumeClaim": {"claimName": self.claim}}),
            ("files", FILES, {"configMap": {"name": self.config_map}}),
            ("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        ]
        if self.keys.get(group.role):
            items = [{"key": _flat(path), "path": path} for path in self.keys[group.role]]
            secret = {"secretName": f"{self.name}-keys-{group.role}", "defaultMode": 0o400, "items": items}
            volumes.append(("keys", KEYS, {"secret": secret}))
        read_only = {"keys": {"readOnly": True}}
        mounts = [{"name": name, "mountPath": path, **read_only.get(name, {})} for name, path, _ in volumes]
        return {
            "restartPolicy": "Never" if group.role == "learner" else "OnFailure",
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [self._container(group, mounts)],
            "volumes": [{"name": name, **source} for name, _, source in volumes],
        }

    def _container(self, group: PodGroup, mounts: list[dict[str, Any]]) -> dict[str, Any]:
        spec = ["--role", group.role, "--node", ",".join(group.nodes)]
        spec += ["--hosts", f"{FILES}/hosts", "--config", f"{FILES}/config.yaml"]
        spec += ["--renumber", "--set", f"run.name={self.run_name}"]
        spec += ["--replay", self.replay] if self.replay is not None else []
        # of its pod: Kubernetes fills in $(X)
        own = ["--index", "$(JOB_COMPLETION_INDEX)", "--host", "$(POD_IP)", "--ready-file", READY, "--resume-if-begun"]
        look = {"exec": {"command": ready.probe(READY)}, "periodSeconds": 10, "timeoutSeconds": 5}
        container: dict[str, Any] = {
            "name": group.role,
            "image": self.image,
            "workingDir": WORK,
            "command": ["python", "-m", "slipstream.launch.node", *spec, *own],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *({"name": key, "value": value} for key, value in self.config.network.env.items()),
                *(
                    {"name": key, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": key}}}
                    for key in self.forward
                ),
            ],
            "readinessProbe": look,
            "volumeMounts": mounts,
        }
        if group.role == "learner":
            network, bus, several = self.config.network, self.config.weight_bus, len(self.config.learner_nodes) > 1
            named = {"replay": network.replay_port, "weight-bus": bus.port}
            named |= {"rendezvous": self.config.placement.rendezvous_port} if several else {}
            container["ports"] = [{"name": name, "containerPort": port} for name, port in named.items() if port]
        if self.config.placement.device != "cpu":
            container["resources"] = {"limits": {"nvidia.com/gpu": group.devices}}
        return container

    def _secret(self, role: NodeRole) -> str:
        data = {_flat(path): text for path, text in self.keys[role].items()}
        head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{self.name}-keys-{role}"}}
        return _yaml({**head, "type": "Opaque", "stringData": data})


def _flat(path: str) -> str:
    """A path as a Secret takes it for a name."""
    return path.replace("/", ".")


def _yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_BlockDumper, sort_keys=False, width=1000)


class _BlockDumper(yaml.SafeDumper):
    """Several lines of text as a block, so that a configuration can be read."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _block)
