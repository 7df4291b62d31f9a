"""Placement: which process gets which device, what its command and environment are, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config, ConfigError, load
from configs.machine import DETERMINISTIC
from configs.placement import shares
from slipstream.plan.processes import Machine, Plan, assign

GPU = ["placement.device=cuda", "rollout.engine=sglang", "network.insecure=true", "network.replay_port=5757"]
TWO_SIDES = [
    "placement.rollout='node0:0-3; node2:0-7'",
    "placement.learner='node1:0-7; node0:4-7'",
    "rollout.groups_per_step=12",
]
MACHINES = {f"node{i}": Machine(f"10.0.0.{i}", gpus=8) for i in range(4)}


def config_of(*overrides: str) -> Config:
    return load("quickstart", [*GPU, *overrides])


def plan_of(config: Config, machines: dict[str, Machine] | None = None, **more: object) -> Plan:
    return assign(config, machines or MACHINES, config_file="c.yaml", **more)  # type: ignore[arg-type]


def refused(config: Config, machines: dict[str, Machine] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(config, machines)
    return str(caught.value)


def visible(plan: Plan, role: str) -> dict[str, str]:
    return {p.name: p.environment["CUDA_VISIBLE_DEVICES"] for p in plan.processes if p.role == role}


def test_a_split_gives_the_first_gpus_to_the_engines_and_the_next_to_the_learner():
    plan = plan_of(config_of("placement.split=6:2", "placement.tensor_parallel=2"))
    assert visible(plan, "rollout") == {"rollout-0": "0,1", "rollout-1": "2,3", "rollout-2": "4,5"}
    assert visible(plan, "learner") == {"learner ranks 0-1": "6,7"}
    (learner,) = plan.of("node0", "learner")
    places = [(name, its["RANK"], its["LOCAL_RANK"], its["WORLD_SIZE"]) for name, its in learner.of_ranks]
    assert places == [("learner-0", "0", "0", "2"), ("learner-1", "1", "1", "2")]
    assert "MASTER_PORT" not in learner.environment, "one is found at the start"


def test_one_gpu_can_be_shared():
    machine = Machine("127.0.0.1", gpus=1)
    plan = plan_of(config_of("placement.split=1:1", "placement.share_gpus=true"), {"node0": machine})
    assert visible(plan, "rollout") == {"rollout-0": "0"} and visible(plan, "learner") == {"learner rank 0": "0"}
    (share,) = shares(config_of("placement.split=4:2", "placement.share_gpus=true").placement)
    assert (share.rollout, share.learner) == ((0, 1, 2, 3), (2, 3)), "the last of those that there are"


def test_nodes_meet_at_the_first_learner_node_in_the_order_of_the_placement():
    plan = plan_of(config_of(*TWO_SIDES))
    assert plan.first_node == "node1" and [p.node for p in plan.processes if p.role == "replay"] == ["node1"]
    first, second = (p for p in plan.processes if p.role == "learner")
    assert (first.name, second.name) == ("learner ranks 0-7", "learner ranks 8-11")
    for process in (first, second):
        assert (process.environment["MASTER_ADDR"], process.environment["MASTER_PORT"]) == ("10.0.0.1", "29400")
    assert [(its["RANK"], its["LOCAL_RANK"]) for _, its in second.of_ranks][:2] == [("8", "0"), ("9", "1")]
    assert first.ports["rendezvous"] == 29400 and second.ports == {}
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7" and second.environment["LOCAL_WORLD_SIZE"] == "4"
    for process in plan.processes:
        host = MACHINES[process.node].address
        assert f"network.host={host}" in process.command
        if process.role != "replay":
            assert process.command[process.command.index("--replay") + 1] == "tcp://10.0.0.1:5757"
    assert len({p.name for p in plan.processes if p.role == "rollout"}) == 12


@given(st.data())
@settings(max_examples=60)
def test_every_gpu_has_one_process_and_engines_stay_on_their_node(data):
    tensor_parallel = data.draw(st.sampled_from([1, 2, 4]))
    rollout, learner = [], []
    for node in data.draw(st.lists(st.sampled_from(sorted(MACHINES)), min_size=2, unique=True)):
        devices = data.draw(st.permutations(range(8)))
        engines = data.draw(st.integers(0, 8 // tensor_parallel - 1)) * tensor_parallel
        ranks = data.draw(st.integers(0, 8 - engines))
        for side, chosen in ((rollout, devices[:engines]), (learner, devices[engines : engines + ranks])):
            if chosen:
                side.append(f"{node}:{','.join(map(str, chosen))}")
    if not rollout or not learner:
        return
    sides = [f"placement.rollout='{'; '.join(rollout)}'", f"placement.learner='{'; '.join(learner)}'"]
    ranks = sum(part.count(",") + 1 for part in learner)
    config = config_of(*sides, f"placement.tensor_parallel={tensor_parallel}", f"rollout.groups_per_step={ranks}")
    plan = plan_of(config)
    shown = [(process.node, process.environment.get("CUDA_VISIBLE_DEVICES")) for process in plan.processes]
    used = [(node, gpu) for node, gpus in shown if gpus for gpu in gpus.split(",")]
    assert len(used) == len(set(used)) == config.num_rollout_devices + config.num_learner_ranks
    assert all(len(p.devices) == tensor_parallel for p in plan.processes if p.role == "rollout")
    assert sum(p.role == "rollout" for p in plan.processes) == config.num_rollout_servers


def test_what_the_user_has_made_visible_is_what_is_counted():
    config = config_of("placement.split=1:1")
    plan = plan_of(config, {"node0": Machine("127.0.0.1", gpus=8, visible=("5", "GPU-abc"))})
    assert visible(plan, "rollout") == {"rollout-0": "5"} and visible(plan, "learner") == {"learner rank 0": "GPU-abc"}
    said = refused(config, {"node0": Machine("127.0.0.1", gpus=8, visible=("5",))})
    assert "placement.split: '1:1' needs 2 GPUs" in said and "CUDA_VISIBLE_DEVICES=5 shows 1" in said


def test_the_environment_reaches_every_process():
    given_ = "network.env={NCCL_SOCKET_IFNAME: eth0, NCCL_NVLS_ENABLE: '1'}"
    for process in plan_of(config_of(*TWO_SIDES, given_)).processes:
        assert process.environment["NCCL_SOCKET_IFNAME"] == "eth0"
        assert process.environment["NCCL_NVLS_ENABLE"] == "1", "the user's word counts"
        assert process.environment["NCCL_CUMEM_ENABLE"] == "0"
        assert process.environment["OMP_NUM_THREADS"] == "1"
        assert "NCCL_ALGO" not in process.environment


def test_deterministic_kernels_are_a_matter_of_the_learner():
    plan = plan_of(config_of(*TWO_SIDES, "learner.deterministic=true", "network.env={NCCL_ALGO: Tree}"))
    for process in plan.processes:
        found = {name: process.environment.get(name) for name in DETERMINISTIC}
        assert found == (DETERMINISTIC if process.role == "learner" else dict.fromkeys(found)) | {"NCCL_ALGO": "Tree"}


@pytest.mark.parametrize(
    ("overrides", "machines", "words"),
    [
        (["placement.split=6:4"], MACHINES, ["placement.split", "'6:4'", "needs 10 GPUs", "node0 has 8"]),
        (TWO_SIDES, {"node0": Machine("10.0.0.1")}, ["'node1'", "not among the hosts", "host file"]),
        (TWO_SIDES, MACHINES | {"node2": Machine("10.0.0.9", gpus=4)}, ["node2:7", "needs 8 GPUs", "node2 has 4"]),
        (TWO_SIDES, MACHINES | {"node1": Machine("127.0.0.1")}, ["network.host", "cannot be reached", "--hosts FILE"]),
        ([*TWO_SIDES, "network.replay_port=0"], MACHINES, ["network.replay_port", "give a port"]),
        ([*TWO_SIDES, "weight_bus.port=5757"], MACHINES, ["network.replay_port", "weight_bus.port", "each its own"]),
        (["network.env={CUDA_VISIBLE_DEVICES: '3'}"], MACHINES, ["network.env", "CUDA_VISIBLE_DEVICES", "leave it"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides, machines, words):
    said = refused(config_of(*overrides), machines)
    assert [word for word in words if word not in said] == [], said
