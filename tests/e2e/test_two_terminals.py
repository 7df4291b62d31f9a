"""Learner and rollout servers started apart, as on two hosts: scripts/start_learner.sh, start_rollout_nodes.sh.

By default: test_namespaces.py (the scripts over four hosts), test_elastic.py (a server that joins a run), and
tests/replay/test_service.py (a server of another configuration).
"""

import sys

import pytest

from tests.support.runs import Run, environment, free_port, left_over, patient_reward, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GROUPS = 30, 4


def test_two_terminals_and_a_rollout_server_that_joins_in_the_middle(tmp_path, untrained):
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    variables = {**environment(), "PORT": str(port), "REPLAY": address}
    go_on = tmp_path / "go-on"
    reward = patient_reward(tmp_path, go_on, pause_s=0.15)  # all steps take longer than a join
    same = [*untrained.settings, f"run.dir={tmp_path}", "run.name=apart", f"rollout.groups_per_step={GROUPS}"]
    same += [f"reward.function={reward}", f"learner.total_steps={STEPS}", "placement.split=1:1"]
    same += ["evaluation.every_steps=0", "tracking.live=plain", "tracking.plot=false"]
    arguments = [word for setting in same for word in ("--set", setting)]
    first, learner = tmp_path / "rollouts.out", tmp_path / "learner.out"
    rollout_script = ("bash", "scripts/start_rollout_nodes.sh", *arguments)
    learner_script = ("bash", "scripts/start_learner.sh", *arguments)
    by_hand = (sys.executable, "-m", "rollout_server.main", "--replay", address, "--server-name", "late", *arguments)

    with (
        terminal(first, *rollout_script, environment=variables) as rollouts,  # may well come before the learner
        terminal(learner, *learner_script, environment=variables) as launcher,
    ):
        run = Run(launcher, tmp_path / "apart", learner)
        run.wait_for_step(1)
        assert f"replay listens at {address}: start rollout servers with --replay {address}" in run.text()
        stranger = (
            *by_hand,
            "--server-name",
            "stranger",
            "--set",
            "reward.function=exact",
            "--set",
            "rollout.dtype=bfloat16",
        )
        with terminal(tmp_path / "stranger.out", *stranger, environment=variables) as refused:
            assert refused.wait(60) != 0
        said = (tmp_path / "stranger.out").read_text()
        assert (
            'reward.function is "exact" there and' in said and 'rollout.dtype is "bfloat16" there and "float32"' in said
        )
        with terminal(tmp_path / "late.out", *by_hand, environment=variables) as late:
            run.wait_until(lambda: "'late' (pid" in run.log("replay"), "the second server's Hello")
            joined = run.steps()[-1]["training/global_step"]
            run.wait_until(
                lambda: run.steps()[-1].get("rollout/groups/late", 0) > 0, "a trained group of the second", 90
            )
            go_on.touch()
            assert run.wait() == 0, run.text()[-3000:]
            assert late.wait(30) == 0, (tmp_path / "late.out").read_text()[-3000:]
        assert rollouts.wait(30) == 0, first.read_text()[-3000:]

    steps = run.steps()
    assert [row["training/global_step"] for row in steps] == list(range(1, STEPS + 1))
    assert max(row["weight_sync/members"] for row in steps) == 2, "the second server is a member of the weight bus"
    assert steps[-1]["weight_sync/digests_equal"] is True
    last = steps[-1]
    served = {key.removeprefix("rollout/groups/"): value for key, value in last.items() if "rollout/groups/" in key}
    assert len(served) == 2 and served["late"] > 0 and min(served.values()) > 0, served
    assert joined >= 1 and last["weight_sync/joins"] >= 2, "the bus filled it with the version of that moment"
    assert len(run.groups()) == len(set(run.groups())) == STEPS * GROUPS
    assert left_over(str(tmp_path)) == []
