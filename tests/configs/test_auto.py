"""`auto`: the engine, the dtypes and the bus's backend follow from the devices, before anything is checked."""

import pytest

from configs import Config, ConfigError, load, machine
from configs.auto import BY_DEVICE
from configs.loading import PRESETS, dump, parse, read_yaml

ON_CPU = {"rollout.engine": "torch", "rollout.dtype": "float32", "learner.compute_dtype": "float32"}
ON_CPU |= {"checkpoint.hf_dtype": "float32", "learner.compile": False, "weight_bus.stage_in": "server"}
ON_GPU = {"rollout.engine": "sglang", "rollout.dtype": "bfloat16", "learner.compute_dtype": "bfloat16"}
ON_GPU |= {"checkpoint.hf_dtype": "bfloat16", "learner.compile": True, "weight_bus.stage_in": "engine"}
NODES = "rollout: 'node1:0', learner: 'node0:0'"


@pytest.fixture
def gpus(monkeypatch):
    """What this machine has: the last number in it."""
    found = [0]
    monkeypatch.setattr(machine, "count_gpus", lambda: found[-1])
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


MINIMAL = "model: {path: m}\ndata: {train: t.jsonl}\nreward: {function: exact}\n"


def resolved(placement: str, *settings: str) -> dict[str, str]:
    return values(parse(f"{MINIMAL}placement: {{{placement}}}\n", "here", settings))


def values(config: Config) -> dict[str, str]:
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in BY_DEVICE}


@pytest.mark.parametrize(
    ("placement", "here", "expected", "backend"),
    [
        ("device: cpu", 8, ON_CPU, "gloo"),
        ("device: cuda", 0, ON_GPU, "nccl"),
        ("device: cuda, share_gpus: true", 0, ON_GPU, "gloo"),
        ("device: auto", 0, ON_CPU, "gloo"),
        ("device: auto", 2, ON_GPU, "nccl"),
        ("split: '1:1'", 1, ON_GPU, "nccl"),
        (NODES, 0, ON_GPU, "nccl"),
        (f"device: cpu, {NODES}", 8, ON_CPU, "gloo"),
    ],
)
def test_values_follow_from_the_devices(gpus, placement, here, expected, backend):
    gpus.append(here)
    assert resolved(placement) == expected | {"weight_bus.backend": backend}
    written = [f"{key}=auto" for key in BY_DEVICE]
    assert resolved(placement, *written) == expected | {"weight_bus.backend": backend}


def test_what_is_given_stays(gpus):
    given = {"rollout.engine": "torch", "learner.compute_dtype": "float32", "weight_bus.backend": "ucc"}
    settings = [f"{key}={value}" for key, value in given.items()]
    assert resolved("device: cuda", *settings) == ON_GPU | given | {"weight_bus.stage_in": "server"}


WIDE = "device: cuda, split: '2:1', tensor_parallel: 2"


@pytest.mark.parametrize(
    ("placement", "settings", "expected"),
    [
        ("device: cpu", ["rollout.engine=sglang"], "engine"),
        ("device: cuda", ["weight_bus.backend=ucc"], "server"),
        ("device: cuda", ["weight_bus.transport=disk", "weight_bus.folder=/shared"], "server"),
        ("device: cuda", ["weight_bus.collective_timeout_s=120"], "server"),
        ("device: cuda", ["weight_bus.collective_timeout_s=200", "rollout.engine_deadline_s=300"], "engine"),
        (WIDE, [], "server"),
        (WIDE, ["weight_bus.stage_in=engine"], "engine"),
        ("device: cuda", ["weight_bus.stage_in=server"], "server"),
    ],
)
def test_updates_are_received_in_the_engine_where_it_can(gpus, placement, settings, expected):
    assert resolved(placement, *settings)["weight_bus.stage_in"] == expected


@pytest.mark.parametrize("key", ["mesh.tensor=2", "offload_activations=true"])
def test_layers_are_not_compiled_beside_what_does_not_go_with_it(gpus, key):
    placement = "device: cuda, split: '1:2'"
    assert resolved(placement)["learner.compile"] and not resolved(placement, f"learner.{key}")["learner.compile"]
    with pytest.raises(ConfigError, match=r"learner\.compile"):
        resolved(placement, f"learner.{key}", "learner.compile=true")


def test_gpus_that_are_hidden_or_that_torch_cannot_use_are_none(gpus, monkeypatch):
    gpus.append(2)
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        assert resolved("device: auto")["rollout.engine"] == "torch"
    monkeypatch.setattr(machine, "torch_has_cuda", lambda: False)
    assert resolved("device: auto")["rollout.engine"] == "torch"


def test_the_run_folder_holds_what_auto_became(gpus, monkeypatch):
    gpus.append(1)
    config = parse(MINIMAL, "here")
    assert "Rollouts: sglang, bfloat16; learner: bfloat16; weights over nccl." in config.arithmetic()
    monkeypatch.setattr(machine, "count_gpus", lambda: pytest.fail("a resolved file asks no machine"))
    assert parse(dump(config), "here") == config


def test_gpu_presets_leave_these_keys_to_auto():
    for path in [path for kind in ("gpu", "nodes") for path in PRESETS.glob(f"*[0-9]{kind}.yaml")]:
        tree = read_yaml(path.read_text(encoding="utf-8"))
        given = {f"{section}.{key}" for section, keys in tree.items() for key in keys}
        assert not given & BY_DEVICE.keys() and values(load(path.stem))["rollout.engine"] == "sglang"
