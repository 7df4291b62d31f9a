"""What doctor makes of facts: side by side, of devices, of links; and how it reads them from a machine."""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import ConfigError, load
from configs.errors import NoRoom, PackageMissing
from configs.machine import multiplies_bfloat16
from learner.policy.memory import GIB, available_bytes
from slipstream.check import checks, compare, facts, machine, memory
from slipstream.check.checks import check_available
from slipstream.check.finding import Finding
from slipstream.check.machine import disk as room
from slipstream.check.pictures import problem_with_pictures
from slipstream.check.places import Place
from slipstream.families.sizes import Sizes
from slipstream.launch.doctor import places_of
from slipstream.launch.reach.commands import Ssh

CONFIG = load("quickstart", ["placement.device=cpu", "weight_bus.backend=gloo"])
OVER_NCCL = load("quickstart", ["placement.device=cuda", "weight_bus.backend=nccl"])
ITS = {
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "nccl": "2.27.3", "transformers": "5.12.1"},
    "pins": [],
    "code": "aa",
    "environment": {"NCCL_CUMEM_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0"},
    "model": {"tokenizer": "t", "chat_template": "c", "vocab_size": "64", "eos_token_ids": "2", "architecture": "a"},
    "keys": None,
}
LEARNER, ROLLOUT = (replace(place, planned=frozenset()) for place in places_of(CONFIG, None, "python"))


def side_by_side(config: Any = CONFIG, **its: Any) -> list[Finding]:
    """Of a learner with ITS and a rollout place that differs by `its`."""
    found = compare.compared(config, {LEARNER: ITS, ROLLOUT: {**ITS, **its}}, {LEARNER: (0.0, 0.01)})
    return [finding for finding in found if finding.severity != "ok"]


def test_what_is_alike_is_in_order_and_own_devices_do_not_count():
    assert (
        side_by_side(environment={"NCCL_CUMEM_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "1", "NCCL_IB_HCA": "mlx5_1"}) == []
    )


@pytest.mark.parametrize(
    ("its", "severity", "words"),
    [
        (
            {"environment": {"NCCL_CUMEM_ENABLE": "1"}},
            "stop",
            ["is 0 at learner of node0, 1 at rollout", "network.env"],
        ),
        (
            {"environment": ITS["environment"] | {"UCX_TLS": "tcp"}},
            "warn",
            ["UCX_TLS is not set at learner", "tcp at ro"],
        ),
        (
            {"versions": ITS["versions"] | {"nccl": "2.28.9"}},
            "stop",
            ["nccl is 2.27.3 at learner", "same PyTorch on both"],
        ),
        (
            {"versions": ITS["versions"] | {"torch": "2.11.0"}},
            "warn",
            ["torch is 2.13.0 at", "pip install the same torch"],
        ),
        ({"code": "bb"}, "warn", ["slipstream's own code is aa at learner", "same release on all nodes"]),
        ({"pins": ["sglang wants torch==2.11.0, 2.13.0 is installed"]}, "warn", ["rollout of node0: sglang wants"]),
        ({"model": ITS["model"] | {"eos_token_ids": "3"}}, "stop", ["eos_token_ids differs", "copy one model folder"]),
        ({"model": {"error": "config.json: missing"}}, "stop", ["model: rollout of node0: config.json: missing"]),
    ],
)
def test_what_differs_is_named_with_both_values_and_a_way_out(its, severity, words):
    (finding,) = side_by_side(OVER_NCCL, **its)
    assert finding.severity == severity and [word for word in words if word not in finding.line] == [], finding.line


def test_over_a_shared_folder_no_server_meets_the_learners_nccl():
    bus = OVER_NCCL.weight_bus.model_copy(update={"transport": "disk", "folder": "/shared"})
    config = OVER_NCCL.model_copy(update={"weight_bus": bus})
    assert [one.severity for one in side_by_side(config, versions={**ITS["versions"], "nccl": "2.28.9"})] == ["warn"]


def test_keys_of_another_folder_and_clients_that_are_not_admitted():
    mine = {"server": "S" * 40, "client": "L", "name": "learner", "admits": ["L", "N"]}
    its = {LEARNER: ITS | {"keys": mine}}
    good = list(compare.keys({**its, ROLLOUT: ITS | {"keys": {**mine, "client": "N", "admits": []}}}))
    assert [finding.severity for finding in good] == ["ok"]
    wrong = {"server": "T" * 40, "client": "X", "name": "node1", "admits": []}
    found = list(compare.keys({**its, ROLLOUT: ITS | {"keys": wrong}}))
    assert ["copy server.key" in found[0].line, "--export-node node1" in found[1].line] == [True, True]


def test_a_clock_counts_by_more_than_it_was_measured_with():
    def severity(ahead: float, doubt: float) -> list[str]:
        return [finding.severity for finding in compare.clock({ROLLOUT: (ahead, doubt)})]

    assert (severity(1.5, 0.1), severity(-1.5, 0.1), severity(1.5, 0.6)) == (["warn"], ["warn"], ["ok"])


# ---- a machine ------------------------------------------------------------------------------------------

GPU = {"index": "0", "name": "NVIDIA H200", "memory.total": "143771", "memory.used": "4", "driver_version": "570"}


def devices(**its: Any) -> dict[str, str]:
    """The first finding of each check, of three GPUs."""
    found = {"gpus": [GPU] * 3, "infiniband": {}, **its}
    listed = [(each.code, f"{each.severity} {each.line}") for each in machine.devices(OVER_NCCL, found, 3, "")]
    return dict(reversed(listed))


def test_devices_that_are_missing_busy_or_mixed():
    assert devices()["gpu"] == "ok gpu: 3 x NVIDIA H200, 143771 MiB"
    assert devices(gpus=[GPU, GPU | {"memory.used": "40960"}, GPU])["gpu"].startswith("warn gpu: GPU 0 has 40.0 GiB in")
    assert devices(gpus=[GPU] * 2)["gpu"].startswith("stop gpu: 3 GPU(s) are placed here, nvidia-smi shows 2")
    assert devices(gpus=[GPU, GPU, GPU | {"name": "T4"}])["gpu"].startswith("warn gpu: several kinds")
    assert devices(gpus=[])["gpu"] == (
        "stop gpu: 3 GPU(s) are placed here, nvidia-smi shows 0; correct placement, or the driver and the container's"
        " --gpus"
    )


def test_infiniband_ports_are_read_and_one_that_is_down_is_named(tmp_path: Path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
            (port / file).write_text(text + "\n")
    found = facts.infiniband(tmp_path)
    assert found["mlx5_0:1"] == "ACTIVE InfiniBand 400 Gb/sec (4X NDR)"
    assert devices(infiniband=found)["infiniband"].startswith("warn infiniband: not active: mlx5_1:1; ibstat")
    assert "infiniband" not in devices(), "one machine needs none"


SIZES = Sizes.of(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    | {"num_attention_heads": 32, "num_key_value_heads": 8}
)  # 8B
ON_GPUS = ("placement.device=cuda", "rollout.engine=sglang")


@pytest.mark.parametrize(("engine", "kernels"), [("torch", []), ("sglang", ["sgl_kernel", "triton"])])
def test_an_engine_says_what_it_needs(monkeypatch, engine: str, kernels: list[str]):
    named = ["placement.device=cuda", f"rollout.engine={engine}", "weight_bus.backend=gloo"]
    config = load("quickstart", [*named, "placement.share_gpus=true", "placement.gpu_gib=80"])
    assert machine.needed_kernels(config, "rollout") == kernels
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with contextlib.nullcontext() if not kernels else pytest.raises(PackageMissing, match=rf"\[{engine}\]"):
        check_available(config, runs_servers=True)
    with contextlib.nullcontext() if not kernels else pytest.raises(NoRoom, match="mem_fraction_static"):
        available_bytes(config)
    adapters = load("pictures", [*named, "learner.lora.rank=8"])
    assert problem_with_pictures(adapters, {"model_type": "qwen2_vl"}).startswith("learner.lora.rank") == bool(kernels)


@pytest.mark.parametrize(
    ("said", "warns"),
    [
        ("flags\t\t: fpu avx2\n", True),
        ("flags\t\t: avx512_bf16 fpu\nflags\t\t: fpu\n", False),
        ("Features\t: fp bf16\n", False),
        ("Features\t: fp asimd\n", True),
        ("model name: x\n", False),
        (None, False),
    ],
)
def test_bfloat16_on_a_processor_without_its_products_is_named(monkeypatch, tmp_path, said: str | None, warns: bool):
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    monkeypatch.setattr(checks, "multiplies_bfloat16", partial(multiplies_bfloat16, tmp_path / "cpuinfo"))
    asked = ["learner.compute_dtype=bfloat16"]
    found = [finding.mend for finding in checks.found(load("quickstart", asked), [checks.processor])]
    assert found == ["--set learner.compute_dtype=float32"] * warns
    assert not list(checks.found(load("quickstart"), [checks.processor]))


def test_shared_memory_and_disks_are_held_against_what_a_run_writes(tmp_path: Path):
    staged = ("weight_bus.backend=gloo", "weight_bus.stage_in=server")
    config = load("quickstart", [*ON_GPUS, *staged, f"run.dir={tmp_path}"])
    found = [machine.shared_memory(config, SIZES, free * GIB, 1, "") for free in (64, 12, 1)]
    assert [each.severity for each in found] == ["ok", "warn", "stop"] and "docker run --shm-size" in found[2].line
    assert "one checkpoint and the journal take" in room(config, replace(SIZES, has_experts=(False,) * 100_000)).line


@pytest.mark.parametrize(
    ("settings", "state", "weights"),
    [
        ([], 12, 2),
        (["checkpoint.hf_dtype=float32"], 12, 4),
        (["learner.lora.rank=16"], 0, 2),  # hf/ has the whole policy, adapters merged
        (["algorithm.advantage=gae"], 24, 2),
        (["checkpoint.keep_best=3", "checkpoint.best_metric=x", "checkpoint.keep=1"], 12, 2),
    ],
)
def test_a_disk_is_held_against_all_that_checkpoints_have(monkeypatch, settings: list[str], state: int, weights: int):
    config = load("quickstart", [*ON_GPUS, *settings])
    trained = SIZES.adapter_parameters(config.learner.lora) * 12 if config.learner.lora.rank else 0
    one = SIZES.parameters * (state + weights) + trained
    assert machine.checkpoint_bytes(config, SIZES) == one
    best = config.checkpoint.keep_best * SIZES.parameters * weights
    whole = (config.checkpoint.keep + 1) * one + best + machine.JOURNAL_BYTES
    found = {}
    for free in (one, whole - 2**20, whole + 2**20):
        said = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_files=0, f_favail=0)
        monkeypatch.setattr(machine.os, "statvfs", lambda _, said=said: said)
        found[free] = room(config, SIZES).severity
    assert list(found.values()) == ["stop", "warn", "ok"]


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        (["weight_bus.backend=nccl"], "ok"),
        (["weight_bus.backend=gloo", "weight_bus.stage_in=server"], "stop"),
        (["weight_bus.backend=ucc"], "stop"),
        (["weight_bus.transport=disk", "weight_bus.folder=/shared", "weight_bus.backend=nccl"], "stop"),
        (["weight_bus.backend=gloo"], "ok"),
        (["weight_bus.backend=gloo", "learner.lora.rank=16"], "ok"),
    ],
)
def test_only_updates_in_host_memory_are_counted_into_shared_memory(settings: list[str], severity: str):
    """CUDA memory goes to SGLang's processes by its handle, and with LoRA an update is adapters."""
    found = machine.shared_memory(load("quickstart", [*ON_GPUS, *settings]), SIZES, GIB, 1, "")
    assert found.severity == severity, found.line


@pytest.mark.parametrize(("total", "available", "severity"), [(64, 60, "ok"), (64, 40, "warn"), (32, 30, "stop")])
def test_host_memory_is_held_against_what_a_checkpoint_copies(total: int, available: int, severity: str):
    found = machine.host_memory(41 * GIB, "41.0 GiB of host memory", total * GIB, available * GIB)
    assert (found.severity, found.code) == (severity, "host-memory")


@pytest.mark.parametrize(("placed", "gib"), [([], 166), (["placement.learner=node1:0-3; node2:0-3"], 83)])
def test_the_copies_of_a_14b_are_those_of_the_ranks_of_a_node(placed: list[str], gib: int, tmp_path: Path):
    """12 bytes a parameter over all ranks; `split` puts eight on one node."""
    shape = {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17_408, "num_attention_heads": 40}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    where = [*placed, "placement.rollout=node0:0"] if placed else ["placement.split=1:8"]
    config = load("quickstart", [f"model.path={tmp_path}", "placement.device=cpu", *where])
    needs, said = memory.host_budget(config)
    assert gib < needs / GIB < gib + 4 and "copy for checkpoints" in said, said


def test_a_critic_of_a_family_that_is_not_trained_is_refused_by_its_key(tmp_path: Path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    for name in ("llama", "gpt2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | {"model_type": name, "vocab_size": 64}))
    settings = [f"model.path={tmp_path / 'llama'}", f"critic.path={tmp_path / 'gpt2'}", "algorithm.advantage=gae"]
    with pytest.raises(ConfigError, match=r"critic\.path: '.*gpt2' is a 'gpt2' model.*llama"):
        memory.host_budget(load("quickstart", settings))


def test_a_container_of_16_gib_of_shared_memory_starts_a_run_over_nccl():
    config = load("gsm8k-qwen2-7b-8gpu", ["placement.device=cuda"])
    engines = machine.engines_on(config, config.shares[0].node)
    assert engines > 1 and machine.shared_memory(config, SIZES, 16 * GIB, engines, "").severity == "ok"


@pytest.mark.parametrize(("absent", "dev"), [("", 1), ("pytest", 0)])
def test_pins_that_are_broken_are_found(monkeypatch: pytest.MonkeyPatch, absent: str, dev: int):
    """Those of an extra only where the whole of it is installed."""

    def version(name: str) -> str:
        if name == absent:
            raise facts.metadata.PackageNotFoundError(name)
        return {"msgpack": "1.0.0", "mcp": "1.0.0", "openai": "3.57.0"}.get(name, "2.99")

    monkeypatch.setattr(facts.metadata, "version", version)
    broken = facts.broken_pins()
    assert "slipstream-rl wants msgpack>=1.0.8, 1.0.0 is installed" in broken
    assert "slipstream-rl[mcp] wants mcp<3,>=2.3, 1.0.0 is installed" in broken
    assert sum(line.startswith("slipstream-rl[dev] wants openai") for line in broken) == dev


def test_a_place_is_made_of_the_plan(tmp_path: Path):
    """Also over ssh: the words and the environment that the node's own processes get."""
    settings = ["placement.split=null", "placement.learner=node0:0", "placement.rollout=node1:0-1"]
    config = load("quickstart", [*settings, "network.insecure=true", "placement.device=cuda", "weight_bus.port=5760"])
    (tmp_path / "hosts").write_text("node0 10.0.0.1 ssh=a\nnode1 10.0.0.2 ssh=b\n")
    learner, rollout = places_of(config, Ssh(tmp_path / "hosts"), "/env/bin/python")
    assert isinstance(learner, Place) and str(learner) == "learner of node0" and str(rollout) == "rollout of node1"
    assert dict(learner.ports) == {"network.replay_port": 5757, "weight_bus.port": 5760}
    assert rollout.config.network.host == "10.0.0.2" and rollout.command[:-1][0] == "ssh"
    assert "env OMP_NUM_THREADS=1 NCCL_CUMEM_ENABLE=0" in rollout.command[-1]
    assert rollout.command[-1].endswith("CUDA_VISIBLE_DEVICES=0 /env/bin/python -m slipstream.check.probe")
    with pytest.raises(ValueError, match="give --hosts FILE"):
        places_of(config, None, "python")
