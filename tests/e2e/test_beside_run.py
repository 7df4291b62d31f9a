"""Whole runs with a critic and a reference model: killed, played back, until it has learnt."""

import re

import pytest

from tests.e2e.test_in_place import made, play
from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PPO = ("algorithm.advantage=gae", "critic.lr=1e-3", "critic.updates=2")
KL = ("algorithm.kl=k3", "algorithm.kl_in=reward", "algorithm.kl_coef=0.05", "algorithm.reference_refresh_steps=2")
OVERLONG = ("algorithm.overlong_buffer=4", "algorithm.overlong_filter=true")


@pytest.mark.slow
def test_critic_and_reference_go_on_after_a_kill_and_the_journal_reproduces_every_digest(launch):
    settings = (*PPO, *KL, *OVERLONG, "checkpoint.every_steps=3", "replay.journal_keep=all")
    run = launch(*settings, steps=8, split="1:1")
    run.wait_for_step(4)
    run.kill("learner.train")
    assert run.wait(200) == 0, run.text()[-3000:]
    steps = made(run)
    assert sorted(steps) == list(range(1, 9)) and any(len(each) > 1 for each in steps.values())
    assert all(each == each[:1] * len(each) for each in steps.values()), "the digest covers the critic, too"
    code, result = play(launch, run)
    assert (code, result["steps"], result["equal"]) == (0, 8, 8)
    code, result = play(launch, run, "--set", "critic.lr=0.0005")
    assert (code, result["equal"], result["first_different"]) == (1, 0, 1), "of the critic's weights alone"


@pytest.mark.slow
def test_ppo_with_a_critic_learns_to_sort(tmp_path, sort6, zygote):
    """The critic first, on the policy as it is: later on rewards are nearly all 1, and there is little to explain."""
    runs = Runs(tmp_path, sort6, zygote)
    critic = ("critic.lr=2e-3", "critic.updates=8", "critic.warmup_steps=15")
    sizes = ("learner.lr=5e-4", "rollout.groups_per_step=64", "rollout.max_running=512", "evaluation.num_prompts=256")
    run = runs(*PPO, *critic, *sizes, "evaluation.every_steps=5", steps=40)
    try:
        assert run.wait(380) == 0, run.text()[-3000:]
    finally:
        runs.close()
    assert max(row["critic/vf_explained_var"] for row in run.steps()) >= 0.3
    greedy = [value for row in run.rows() for name, value in row.items() if re.fullmatch("val-core/.*/greedy", name)]
    assert greedy[0] < 0.6 and greedy[0] == greedy[2] and greedy[-1] >= 0.9, greedy
