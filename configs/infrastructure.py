"""Where things run and how they find each other: the weight bus, the network, the placement."""

from typing import Literal, Self

from pydantic import Field, field_validator

from configs.auto import BROADCAST_S
from configs.base import Own, OwnPath, Secret, Section


class WeightBus(Section):
    """The one-step-off-policy weight broadcast."""

    transport: Literal["collective", "disk"] = "collective"
    """How buckets travel: a broadcast in a process group of the current epoch, or files in a shared folder."""
    folder: OwnPath[str | None] = None
    """With transport disk: a folder that learner rank 0 and all rollout servers see; mounted anywhere."""
    backend: Literal["auto", "gloo", "nccl", "ucc"] = "auto"
    """Backend of the collective transport; `auto` is nccl on GPUs, gloo on a CPU and where GPUs are shared."""
    stage_in: Literal["auto", "server", "engine"] = "auto"
    """Where staged bytes arrive: in the server's process, or in SGLang's, beside decoding (over gloo or nccl only);
    `auto` is engine where that is possible and each engine has one GPU."""
    port: Own[int] = Field(default=0, ge=0, le=65535)
    """Control port of the publisher; 0 takes a free one (rollout servers learn it from replay)."""
    bucket_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Size of one broadcast."""
    deadline_s: float = Field(default=30.0, gt=0)
    """No step of the learner waits longer than this for the bus."""
    collective_timeout_s: float = Field(default=BROADCAST_S, gt=0)
    """A single broadcast or rendezvous that takes longer has lost a peer."""
    delta: bool = False
    """Send what has changed since the version before, lossless, wherever that is less than half (staged only)."""
    full_every: int = Field(default=50, ge=1)
    """With delta: one of so many versions is sent whole, whatever has changed."""
    compression: Literal["none", "zstd"] = "none"
    """Of what delta sends, for buckets in host memory; zstd needs the extra `zstd`."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Interval of a subscriber's heartbeats; a peer that misses three is silent."""
    max_heals: int = Field(default=3, ge=1)
    """Full refills of a quarantined engine before it is removed from the bus."""

    def of_teacher(self, name: str) -> Self:
        """The bus that refreshes this teacher: beside the policy's, at a port and in a folder of its own."""
        folder = None if self.folder is None else f"{self.folder}/teacher-{name}"
        return self.model_copy(update={"port": 0, "folder": folder, "stage_in": "server"})

    @property
    def medium(self) -> str:
        """What carries the buckets: `disk`, or the backend of the collective transport."""
        return "disk" if self.transport == "disk" else self.backend

    @property
    def on_gpus(self) -> bool:
        """Buckets lie on GPUs, each of which has one process of the group; else in host memory."""
        return self.medium == "nccl"


class Network(Section):
    """Addresses of the control and data plane."""

    host: Own[str] = "127.0.0.1"
    """Address of this machine that replay, the weight bus and collectives bind; each node has its own."""
    replay_port: Own[int] = Field(default=0, ge=0, le=65535)
    """Port of replay; 0 takes a free one (only for runs that the launcher starts whole)."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Interval of every process's heartbeats to replay."""
    silent_after_s: float = Field(default=30.0, gt=0)
    """A peer that was silent for this long is taken for dead: its leases go back to the queue. Heartbeats wait behind
    the message in front of them: the largest, of max_message_bytes, takes 20 s on a link of 100 Mbit/s."""
    max_message_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Larger messages are refused before they are read."""
    insecure: bool = False
    """Allow a non-loopback bind without keys."""
    keys: Own[str | None] = None
    """Folder of CURVE keys (`python -m replay.keys`): every socket of the run is encrypted and authenticated."""
    env: Secret[dict[str, str]] = Field(default={})
    """Environment of every process on every node, for example `{NCCL_SOCKET_IFNAME: eth0, NCCL_IB_HCA: mlx5}`."""


class Placement(Section):
    """The GPU split. Either `split` on this host, or `rollout` and `learner` over named nodes."""

    device: Own[Literal["auto", "cpu", "cuda"]] = "auto"
    """`auto` is cuda where there is a GPU; where another key is `auto`, named nodes count as nodes with GPUs."""
    split: str | None = "1:1"
    """`R:L` on one host: R devices for rollout servers, L for learner ranks (on a CPU: processes)."""
    rollout: str | None = None
    """Rollout GPUs by node, for example `node0:0-5`."""
    learner: str | None = None
    """Learner GPUs by node, for example `node0:6-7; node1:0-7`."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices per engine."""
    share_gpus: bool = False
    """A GPU may be given twice: to both sides (one GPU for everything), which needs weight_bus.backend gloo."""
    gpu_gib: Own[float | None] = Field(default=None, gt=0)
    """Memory of a learner GPU in GiB, which the dry run holds the learner's budget against; unset: what this machine's
    GPUs have."""
    rendezvous_port: int = Field(default=29400, ge=1, le=65535)
    """Port of the first learner node where learner ranks of several nodes meet."""
    give_up_after_s: float = Field(default=600.0, gt=0)
    """How long a learner node may be away before the run ends by its name. Runs on one node need none of it."""

    @field_validator("split", mode="before")
    @classmethod
    def _is_no_number(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError(f"{value} is one number; give both sides as 'R:L', such as '6:2'")
        return value

    local_rollouts: Own[bool] = True
    """The launcher starts the rollout servers of this host; off, they are started by hand."""
