"""Guards: each fired by a step that is broken the way it guards against, through real forwards and updates."""

import dataclasses
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from configs.limits import Limits, rules_of
from learner.checkpoints.folders import CheckpointError
from learner.guards import Alarm, Guards, GuardVerdict, SilentlyWrong
from learner.guards.roll_back import RollBack, RollBacks
from learner.guards.signals import MIN_TOKENS, WARM_UP
from learner.learner import Learner
from learner.policy.model import Policy
from learner.step import StepSums
from learner.trainer import Trainer, Update
from replay.messages import Checkpointed
from tests.learner.recorded import batch_of, random_step
from tests.learner.reference import Recorded
from tests.learner.tiny_models import built, logprobs, make_config, save_model

OFF = dict.fromkeys(("ess", "kl", "entropy", "reward", "same_length", "mismatch"), "") | {"max_logprob_diff": 1e3}
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def make(qwen3: Path, mesh: DeviceMesh) -> Make:
    """Trainers of one policy, each with guards of its own; only what is given is on."""
    dtypes: dict[str, Any] = {}

    def make(dtype: str = "float32", lag: int = 2, **limits: Any) -> Trainer:
        learner = {"compute_dtype": dtype, "lr": 1e-9}
        config = make_config(qwen3, replay={"async_lag": lag}, learner=learner, limits=OFF | limits)
        if dtype not in dtypes:
            dtypes[dtype] = built(config, mesh)
        return Trainer(config, *dtypes[dtype], guards=Guards(config))

    return make


def honest(policy: Policy, step: int, *, lag: int = 0, num_groups: int = 4, **changes: Any) -> list[Recorded]:
    """Trajectories of a step as the policy itself would have sampled them, `lag` versions ago."""
    drawn = random_step(step, num_groups=num_groups)
    found = logprobs(policy, [t.prompt_ids + t.response_ids for t in drawn])
    return [
        dataclasses.replace(
            t,
            logprobs=values[len(t.prompt_ids) - 1 :].tolist(),
            versions=[step - 1 - lag] * len(t.response_ids),
            **changes,
        )
        for t, values in zip(drawn, found, strict=True)
    ]


def train(trainer: Trainer, trajectories: Sequence[Recorded], step: int) -> Update:
    return trainer.train_step(batch_of(trajectories, step))


def shifted(trajectories: Sequence[Recorded], by: float) -> list[Recorded]:
    """The same with other behaviour logprobs."""
    return [dataclasses.replace(t, logprobs=[min(0.0, x + by) for x in t.logprobs]) for t in trajectories]


def said(verdict: GuardVerdict) -> str:
    return "; ".join(alarm.text for alarm in verdict.alarms)


def test_a_batch_of_another_policy_is_skipped_and_an_honest_one_is_not(make: Make, tmp_path: Path, mesh: DeviceMesh):
    trainer = make(ess="skip below 0.9, stop below 0.1 for 3", kl="warn above 0.1")
    policy = trainer.policy
    other, _ = built(make_config(save_model(tmp_path, seed=1)), mesh)
    before = policy.parameter_digest()
    update = train(trainer, honest(other, 5, lag=2), 5)
    assert update.reason == "guard_ess" and not update.applied and policy.parameter_digest() == before
    found = update.values["training/ess"]
    assert f"step 5: (limits.ess) training/ess is {found:.3g}, below 0.9: the update is not applied" in said(
        update.verdict
    )
    assert f"actor/ppo_kl_k3 is {update.values['actor/ppo_kl_k3']:.3g}, above 0.1: it is trained on all the same" in (
        said(update.verdict)
    )
    assert (update.values["guards/ess"], update.values["guards/kl"]) == (1, 1)
    update = train(trainer, honest(policy, 6, lag=2), 6)
    assert update.applied and not update.verdict.alarms and update.values["training/ess"] > 0.999
    assert update.values["guards/ess"] == 1, "firings so far"


def test_an_entropy_that_falls_below_a_share_of_its_moving_mean_is_a_collapse(make: Make):
    trainer = make(entropy="skip below 0.5")
    norm = {shard.name: shard.local for shard in trainer.policy.shards()}["model.norm.weight"]
    drawn = honest(trainer.policy, 20)
    for step in range(1, WARM_UP + 1):
        assert "actor/entropy_ratio" not in train(trainer, drawn, step).values
    assert train(trainer, drawn, 20).values["actor/entropy_ratio"] == pytest.approx(1, abs=1e-3)
    norm.mul_(30.0)
    update = train(trainer, honest(trainer.policy, 21), 21)
    norm.div_(30.0)
    assert update.reason == "guard_entropy" and update.values["actor/entropy_ratio"] < 0.5
    assert "the policy collapses" in said(update.verdict)


def test_a_mean_reward_that_leaves_its_moving_deviation_is_named(make: Make):
    trainer = make(reward="skip above 6")
    drawn, rng = honest(trainer.policy, 20, num_groups=8), random.Random(0)

    def with_rewards(reward: Callable[[Recorded], float]) -> list[Recorded]:
        return [dataclasses.replace(t, reward=reward(t)) for t in drawn]

    for step in range(1, WARM_UP + 3):
        update = train(trainer, with_rewards(lambda t: float(rng.random() < 0.5)), step)
        assert update.applied and update.values.get("critic/rewards/deviations", 0.0) < 4
    poisoned = train(trainer, with_rewards(lambda t: t.reward + 9.0), 20)
    assert poisoned.reason == "guard_reward" and poisoned.values["critic/rewards/deviations"] > 6
    trainer = make(reward="skip above 6, skip below -6")
    for step in range(1, WARM_UP + 2):
        assert train(trainer, with_rewards(lambda t: 0.0), step).reason == "no_tokens"
    first_success = with_rewards(lambda t: float(t is drawn[0]))
    success = train(trainer, first_success, 20)
    share = 1 / len(drawn)
    own = math.sqrt(share * (1 - share) / 8)
    assert success.applied, "no deviation so far, yet the batch has one of its own"
    assert success.values["critic/rewards/deviations"] == pytest.approx(share / own)
    worse = train(trainer, with_rewards(lambda t: t.reward - 9.0), 21)
    assert worse.reason == "guard_reward" and "below -6" in said(worse.verdict)


def test_answers_of_one_length_are_named(make: Make):
    trainer = make(same_length="warn above 0.9 for 2")
    drawn = honest(trainer.policy, 9, num_groups=16)
    names = ("response_ids", "logprobs", "versions", "loss_mask")
    cut = [dataclasses.replace(t, **{name: getattr(t, name)[:1] for name in names}) for t in drawn]
    assert train(trainer, drawn, 9).values["response_length/same_ratio"] < 0.5
    assert not train(trainer, cut, 9).verdict.alarms
    update = train(trainer, cut, 10)
    assert update.applied and "for 2 steps in a row (limits.same_length)" in said(update.verdict)


def test_an_engine_that_runs_another_policy_is_named_at_any_lag(make: Make):
    """Over answers of lag 0; those with an older token say nothing of the engine."""
    trainer = make(max_logprob_diff=1e-3)
    fresh = honest(trainer.policy, 5, num_groups=12)
    assert train(trainer, fresh, 5).applied
    mixed = [dataclasses.replace(t, versions=[2, *t.versions[1:]]) for t in shifted(fresh, -0.01)]
    update = train(trainer, mixed, 5)
    assert update.applied and "training/rollout_logprobs_diff_lag0_mean" not in update.values
    update = train(trainer, [*mixed[:40], *shifted(fresh[40:], -0.01)], 5)
    assert update.reason == "guard_max_logprob_diff"
    assert "(limits.max_logprob_diff) training/rollout_logprobs_diff_lag0_mean is 0.01, above 0.001" in said(
        update.verdict
    )
    assert "the engine does not run the policy that is trained" in said(update.verdict)


def test_in_16_bit_the_first_steps_are_the_measure(make: Make):
    trainer = make("bfloat16", max_logprob_diff_16bit=0.1, mismatch="warn above 3")
    fresh = honest(trainer.policy, 5, num_groups=28)
    assert sum(sum(t.loss_mask) for t in fresh if t.group) > MIN_TOKENS
    for step in range(1, 6):
        update = train(trainer, shifted(fresh, -0.012), 5)
        assert update.applied and not update.verdict.alarms and "training/mismatch_ratio" not in update.values, step
    assert train(trainer, shifted(fresh, -0.012), 5).values["training/mismatch_ratio"] == pytest.approx(1, abs=0.05)
    update = train(trainer, shifted(fresh, -0.06), 5)
    assert update.applied and 3 < update.values["training/mismatch_ratio"] < 5.2
    assert "training/mismatch_ratio is" in said(update.verdict) and "kernels or dtypes" in said(update.verdict)
    update = train(trainer, shifted(fresh, -0.2), 5)
    assert update.reason == "guard_max_logprob_diff" and "(limits.max_logprob_diff_16bit)" in said(update.verdict)
    assert not train(trainer, shifted(fresh[:16], -0.2), 5).verdict.alarms, "too few tokens to tell"


def test_steps_that_teach_nothing_stop_the_run(make: Make):
    trainer = make(flat_reward_steps=2, zero_gradient_steps=2)
    fresh = honest(trainer.policy, 5)
    flat = [dataclasses.replace(t, reward=1.0) for t in fresh]
    assert not train(trainer, flat, 5).verdict.alarms
    stopped = train(trainer, flat, 6).verdict.first("stop")
    assert stopped is not None and stopped.text.startswith("step 6: for 2 steps in a row (limits.flat_reward_steps) ")
    means = {g: sum(t.reward for t in fresh if t.group == g) / 4 for g in {t.group for t in fresh}}
    beyond = [shifted([t], -1.0 if t.reward > means[t.group] else 1.0)[0] for t in fresh]
    updates = [train(trainer, beyond, step) for step in (7, 8)]  # every ratio is past its clip
    assert updates[0].sums.grad_norm == 0 and updates[0].applied
    stopped = updates[1].verdict.first("stop")
    assert stopped is not None and "the gradient is exactly zero although advantages are not" in stopped.text


@pytest.mark.parametrize(
    ("algorithm", "stops"),
    [
        ({}, True),
        ({"drop_zero_advantage": False}, True),
        ({"advantage": "dr_grpo", "drop_zero_advantage": False, "entropy_coef": 0.01}, True),
        ({"advantage": "reinforce++_baseline"}, True),
        ({"advantage": "reinforce++"}, False),
    ],
)
def test_rewards_are_flat_where_no_answer_differs_from_those_that_it_is_compared_with(
    algorithm: dict[str, Any], stops: bool, qwen3: Path, mesh: DeviceMesh
):
    limits = OFF | {"flat_reward_steps": 3, "zero_gradient_steps": 2}
    config = make_config(qwen3, algorithm=algorithm, limits=limits)
    trainer = Trainer(config, *built(config, mesh), guards=Guards(config))
    apart = [[dataclasses.replace(t, reward=float(t.group % 2)) for t in random_step(step)] for step in (1, 2, 3)]
    verdicts = [train(trainer, trajectories, step).verdict for step, trajectories in enumerate(apart, start=1)]
    assert [bool(verdict.alarms) for verdict in verdicts] == [False, False, stops]
    if stops:
        assert "every group's rewards are equal" in said(verdicts[2])


def test_answers_that_are_all_masked_are_not_called_flat(make: Make):
    trainer = make(flat_reward_steps=1, zero_gradient_steps=2)
    masked = [dataclasses.replace(t, loss_mask=[0] * len(t.loss_mask)) for t in honest(trainer.policy, 5)]
    updates = [train(trainer, masked, step) for step in (5, 6)]
    assert [update.reason for update in updates] == ["no_tokens"] * 2 and not updates[0].verdict.alarms
    assert "is every token clipped or masked?" in said(updates[1].verdict)


def test_updates_that_change_no_weight_stop_the_run(qwen3: Path, mesh: DeviceMesh):
    config = make_config(qwen3, learner={"lr": 1e-60}, limits=OFF | {"zero_gradient_steps": 2})
    policy, optimizer = built(config, mesh)
    guards = Guards(config)
    trainer, before = Trainer(config, policy, optimizer, guards=guards), policy.shard_digests("float32")
    found: Alarm | None = None
    for step in (1, 2):
        assert found is None
        update = train(trainer, honest(policy, step), step)
        changed = policy.shard_digests("float32") != before
        assert update.applied and update.sums.grad_norm > 0 and not changed
        found = guards.weigh(step, was_applied=True, has_changed=changed, lr=update.lr)
    assert found is not None and str(found.error()).endswith("raise learner.lr, which is 1e-60 [SLIP-GUARD-04]")
    resumed = Guards(config)
    resumed.restore(json.loads(json.dumps(guards.state())))
    assert resumed.weigh(3, was_applied=False, has_changed=False, lr=0.0) is not None, "the streak is in the checkpoint"
    assert resumed.weigh(4, was_applied=True, has_changed=True, lr=1.0) is None


def test_a_step_of_several_updates_counts_once_and_goes_on_after_a_refused_one(qwen3: Path, mesh: DeviceMesh):
    learner = {"minibatches": 2, "epochs": 2, "lr": 1e-9}
    limits = OFF | {"ess": "skip below 0.7, warn below 0.7 for 2", "skipped_steps": 2, "reward": "warn above 9"}
    config = make_config(qwen3, learner=learner, limits=limits)
    trainer = Trainer(config, *built(config, mesh), guards=Guards(config))
    good = honest(trainer.policy, 5, lag=1)
    bad = [dataclasses.replace(t, logprobs=[-9.0 * (i % 2) for i, _ in enumerate(t.logprobs)]) for t in good]
    mixed = [b if b.group < 2 else g for b, g in zip(bad, good, strict=True)]
    update = trainer.train_step(batch_of(mixed, 5, minibatches=2))
    assert (update.reason, update.applied_updates, update.sums.values["fresh"]) == ("", 2, 0.0)
    assert [alarm.guard for alarm in update.verdict.alarms] == ["ess"] and trainer.guards is not None
    assert set(trainer.guards.broken.values()) == {(1, 5)} and trainer.guards.fired["ess"] == 1
    stops = [trainer.train_step(batch_of(bad, step, minibatches=2)).verdict.first("stop") for step in (6, 7)]
    assert [alarm is not None for alarm in stops] == [False, True], "of two steps, with four updates each"
    assert trainer.guards.memory.reward.count == 3


def test_a_step_ends_once_the_policy_has_moved_far_enough(qwen3: Path, mesh: DeviceMesh):
    learner = {"minibatches": 2, "epochs": 3, "lr": 3e-3, "warmup_steps": 0}
    for proximal in ({}, {"proximal": "current", "correction": "token_tis"}):
        config = make_config(qwen3, learner=learner | {"target_kl": 1e-3}, limits=OFF, algorithm=proximal)
        trainer = Trainer(config, *built(config, mesh))
        drawn = honest(trainer.policy, 5)
        update = trainer.train_step(batch_of(drawn, 5, minibatches=2))
        assert 1 <= update.applied_updates < 6 and update.sums.moved <= 1e-3
        assert trainer.optimizer.num_steps == update.applied_updates == update.values["actor/updates"]


# ---- rules, memory, state ------------------------------------------------------------------------------


def of_ess(step: int, ess: float, *, lag: int = 4, tokens: int = 8) -> tuple[StepSums, Any]:
    """A step with this effective sample size, and nothing else that is worth a look."""
    values = Counter({"weight": 1.0 * tokens, "weight_squared": tokens / ess, "entropy": 1.0 * tokens, "k3": 0.0})
    values["squared_gradient"] = 1.0
    drawn = [
        Recorded(prompt_ids=[1], response_ids=[1] * n, loss_mask=[1] * n, logprobs=[-1.0] * n, versions=[0] * n,
                 reward=float(n), group=0)
        for n in (1, 2)
    ]  # fmt: skip
    return StepSums(values, tokens), batch_of(drawn, step)


def guards(lag: int = 4, **limits: Any) -> Guards:
    config = make_config(Path("unused"), replay={"async_lag": lag}, limits=OFF | limits)
    return Guards(config)


def test_the_lag_is_lowered_one_by_one_and_waits_for_younger_batches():
    judge = guards(3, ess="lower_lag below 0.5")
    lowered = {
        step: v.async_lag for step in range(1, 20) if (v := judge.judge(*of_ess(step, 0.2))).async_lag is not None
    }
    assert lowered == {1: 2, 5: 1, 8: 0}
    assert judge.fired == {"ess": 19} and judge.judge(*of_ess(20, 0.2)).refusal == ""


def test_a_good_step_ends_a_streak():
    judge = guards(ess="skip below 0.5 for 2")
    values = [0.3, 0.8, 0.3, 0.3]
    assert [bool(judge.judge(*of_ess(step, value)).alarms) for step, value in enumerate(values)] == [False] * 3 + [True]


def test_a_step_breaks_a_rule_where_any_of_its_updates_does():
    """At lag 0 the first one is always of the policy that has sampled. Between two steps the run is resumed."""
    judge, stopped = guards(0, ess="stop below 0.5 for 3"), []
    for step, values in enumerate([(1.0, 0.2), (1.0, 1.0), (1.0, 0.2, 1.0), (1.0, 0.2), (1.0, 0.2)], start=1):
        verdicts = [judge.judge(*of_ess(step, value), is_first=not i) for i, value in enumerate(values)]
        stopped += [(step, i, found.first_step) for i, v in enumerate(verdicts) if (found := v.first("stop"))]
        state = json.loads(json.dumps(judge.state()))
        assert bool(state["broken"]) is (step != 2)
        judge = guards(0, ess="stop below 0.5 for 3")
        judge.restore(state)
    assert stopped == [(5, 1, 3)]


RULES = "warn below 0.9, skip below 0.5 for 2, lower_lag below 0.6, stop below 0.1 for 3"


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0.05, 0.3, 0.55, 0.8, 0.95]), min_size=2, max_size=30), st.data())
def test_guards_go_on_from_a_checkpoint_as_if_nothing_had_been(values: list[float], data: st.DataObject):
    cut = data.draw(st.integers(0, len(values)))
    through = guards(ess=RULES, reward="skip above 6", entropy="skip below 0.5", skipped_steps=4)
    verdicts = [through.judge(*of_ess(step, value)) for step, value in enumerate(values)]
    first = guards(ess=RULES, reward="skip above 6", entropy="skip below 0.5", skipped_steps=4)
    for step, value in enumerate(values[:cut]):
        first.judge(*of_ess(step, value))
    again = guards(ess=RULES, reward="skip above 6", entropy="skip below 0.5", skipped_steps=4)
    again.restore(json.loads(json.dumps(first.state())))
    assert [again.judge(*of_ess(cut + i, value)) for i, value in enumerate(values[cut:])] == verdicts[cut:]
    assert again.state() == through.state()
    other = guards(2, ess=RULES)
    other.restore(first.state())
    assert other.async_lag == 2, "resumed with another replay.async_lag, that counts"


@pytest.mark.parametrize(
    ("rule", "fires"),
    [("stop below 0.5 for 3", False), ("stop below 0.9 for 3", True), ("warn below 0.9 for 9", False)],
)
def test_a_streak_goes_on_in_a_resumed_run_only_under_the_bound_that_it_broke(rule: str, fires: bool):
    before, after = guards(ess="warn below 0.9 for 5"), guards(ess=rule)
    for step in range(4, 8):
        before.judge(*of_ess(step, 0.8))
    after.restore(json.loads(json.dumps(before.state())))
    stopped = after.judge(*of_ess(8, 0.3)).first("stop")
    assert (stopped is not None) == fires and (stopped is None or stopped.first_step == 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("skip under 0.3", "'skip under 0.3' is no rule"),
        ("halt below 0.3", "with an action of warn, skip, lower_lag, roll_back, stop"),
        ("warn below 0.3 for 0", "is no rule"),
        ("warn below 0.3,", "'' is no rule"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        Limits(ess=text)


def test_rules_are_read_and_need_what_they_act_on():
    assert [(r.action, r.is_above, r.bound, r.steps) for r in rules_of("skip below 3e-1 for 2,  stop above 5")] == [
        ("skip", False, 0.3, 2),
        ("stop", True, 5.0, 1),
    ]
    with pytest.raises(ValueError, match=r"limits\.ess: lower_lag with replay\.async_lag 0"):
        guards(0, ess="lower_lag below 0.5")
    with pytest.raises(ValueError, match=r"limits\.kl: roll_back with checkpoint\.every_steps 0"):
        make_config(Path("unused"), checkpoint={"every_steps": 0}, limits={"kl": "roll_back above 1"})


def checkpoint(folder: Path, step: int, **mark: Any) -> Path:
    made = folder / "checkpoints" / f"step_{step}"
    made.mkdir(parents=True)
    (made / "COMPLETE").write_text(json.dumps({"files": {}, **mark}))
    return made


def test_a_roll_back_goes_to_the_newest_checkpoint_that_was_good(tmp_path: Path):
    noted = RollBacks(tmp_path)
    assert (noted.count, noted.pending, noted.target(5)) == (0, 0, 0), "no checkpoint at all: the initial model"
    for step in (4, 8, 12):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step_8" / "COMPLETE").unlink()
    assert [noted.target(step) for step in (13, 12, 9, 5, 4)] == [12, 4, 4, 4, -1]
    noted.note(9, step=11, reason="broken")
    for _ in range(2):  # a start that dies in the middle is followed by another one
        again = RollBacks(tmp_path)
        assert (again.count, again.pending) == (1, 9)
        again.set_aside()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["roll_back.json", "step_12.rolled_back_1", "step_4", "step_8"]
    again.done()
    assert (noted.count, noted.pending) == (1, 0)
    noted.note(4, step=5, reason="broken")
    noted.set_aside()
    assert not (tmp_path / "checkpoints" / "step_4").exists(), "the checkpoint of the first bad step is of it"


def test_a_checkpoint_on_its_way_to_the_disk_comes_before_the_choice_of_where_to_roll_back(tmp_path: Path):
    """With checkpoint.keep 1, completing it deletes the one before, which the journal needs no more."""
    old = checkpoint(tmp_path, 8)

    def settle(*, wait: bool) -> Any:
        assert wait
        checkpoint(tmp_path, 10)
        shutil.rmtree(old)
        return SimpleNamespace(step=10, kept=[10], metrics={})

    learner = Mock(config=make_config(Path("unused")), roll_backs=RollBacks(tmp_path), _saved={})
    learner.ranks.agree = lambda *values: list(values)
    learner.checkpoints.settle = settle
    learner._settle = lambda *, wait: Learner._settle(learner, wait=wait)
    with pytest.raises(SilentlyWrong, match=r"it broke, but no checkpoint is older"):
        Learner._roll_back(learner, 11, Alarm("ess", "roll_back", 9, "it broke"))
    assert RollBacks(tmp_path).count == 0
    learner.batches.announce.assert_called_once_with(Checkpointed(step=10, kept=[10]))
    with pytest.raises(RollBack, match=r"it broke .to version 10, 1 of 2."):
        learner.checkpoints.settle = lambda *, wait: None
        Learner._roll_back(learner, 12, Alarm("ess", "roll_back", 11, "it broke"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_stops_completes_the_checkpoint_on_its_way_to_the_disk(fails: bool, caplog: Any):
    learner = Mock(_saved={})
    written = SimpleNamespace(step=10, kept=[10], metrics={})
    learner.checkpoints.settle = Mock(side_effect=CheckpointError("no room") if fails else None, return_value=written)
    learner._settle = lambda *, wait: Learner._settle(learner, wait=wait)
    learner._stop = lambda alarm: Learner._stop(learner, alarm)
    with pytest.raises(SilentlyWrong, match="it broke"):
        Learner._act(learner, 11, GuardVerdict((Alarm("ess", "stop", 9, "it broke"),)))
    learner.checkpoints.settle.assert_called_once_with(wait=True)
    assert learner.batches.announce.called != fails and ("no room" in caplog.text) == fails


def test_a_guard_speaks_once_and_then_rarely_with_a_count(tmp_path):
    guards, said = Guards(make_config(tmp_path)), []
    for step in range(1, 341):
        guards.fired["ess"] += 1
        said.append(guards.said(Alarm("ess", "warn", 1, f"step {step}: low")))
    assert [text for text in said if text] == [
        "step 1: low", "step 10: low (10 times so far)", "step 100: low (100 times so far)"
    ]  # fmt: skip
    assert guards.said(Alarm("ess", "stop", 1, "no more")) == "no more"
