"""The split advisor against arithmetic, recorded runs on GPUs, and what a user sees of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs import loading
from configs.base import ConfigError
from slipstream.plan import __main__ as command
from slipstream.plan import fitting, sources
from slipstream.plan.advice import NODE, Split, advise, splits, with_lag, yaml_of
from slipstream.plan.costs import Costs, Lognormal, Recorded, Workload
from slipstream.plan.simulation import SimulatedRun

DATA = Path(__file__).parents[2] / "benchmarks" / "2026-11-21-h200.json"
LONG = Workload(Recorded(((100,) * 4,)), 10, "all of 100 tokens")
SPREAD = Workload(Lognormal(40, 0.7, 200), 10, "")
ANSWERS = Workload(Lognormal(50, 0.5, 200), 10, "")
TRUTH = Costs(decode_step_s=0.002, decode_answer_s=0.0001, train_token_s=4e-4, commit_s=0.01, publish_s=0.05)
SKEWED = ["placement.split=3:1"]
"""A rank that trains for longer than three engines sample."""
ONE_GPU = ["placement.split=1:1", "placement.share_gpus=true"]


def config(*overrides):
    sizes = ["rollout.group_size=4", "rollout.groups_per_step=8", "rollout.max_new_tokens=2048"]
    sizes += ["learner.max_tokens_per_microbatch=4096", "evaluation.every_steps=0", "placement.split=1:1"]
    return loading.load("quickstart", [*sizes, "placement.device=cuda", *overrides])


def predict(config, split, costs, workload, *, steps=16, trains=True):
    """What so many engines and ranks come to."""
    run = SimulatedRun(config, *split, costs, workload, trains=trains)
    return run.run(config.replay.async_lag + 3, steps)


def recorded(name):
    cases = json.loads(DATA.read_text(encoding="utf-8"))["second_series"]["cases"]
    return {of_case(case).name: (of_case(case), case["t_step"]) for case in cases}[name]


def of_case(case):
    """A result of `python -m scripts.bench pipeline` as if a run had had it; lengths follow from its settings."""
    settings = case["settings"]
    split = str(case["config"]).partition("@")[2]
    given = {
        "rollout.engine": "sglang",
        "rollout.group_size": settings["group_size"],
        "rollout.groups_per_step": settings["groups"],
        "rollout.max_new_tokens": settings["length_cap"],
        "rollout.max_running": settings["max_running"],
        "data.max_prompt_tokens": settings["prompt"],
        "replay.async_lag": settings["lag"],
        "run.seed": settings["seed"],
        "learner.max_tokens_per_microbatch": max(
            settings["microbatch_tokens"], settings["prompt"] + settings["length_cap"]
        ),
        "learner.lr": settings["lr"],
        "placement.split": split,
        "placement.share_gpus": str(settings.get("share_gpus", False)).lower(),
        "model.path": "model",
        "data.train": "prompts.jsonl",
        "evaluation.every_steps": 0,
    }
    overrides = [f"{key}={value}" for key, value in given.items()]
    config = loading.parse("reward: {function: exact}", f"case {case['config']}", overrides)
    median, sigma, cap = settings["length_median"], settings["length_sigma"], settings["length_cap"]
    pause = case.get("pause_ms_p50")
    gather_s = case.get("bus_phases", {}).get("gather_s") or 0.0
    return sources.Measured(
        name=f"case {case['config']}, {settings['groups']} groups, {settings['max_running']} running",
        config=config,
        workload=Workload(
            Lognormal(median, sigma, cap),
            settings["prompt"],
            f"lognormal, median {median}, sigma {sigma:g}, cut at {cap}, as the benchmark forces them",
        ),
        step_s=case["t_step"],
        train_s=case["t_train"],
        busy_s=(1 - case["rollout_idle"]) * case["t_step"],
        commit_s=max(0.0, (case.get("param_sync_s") or 0.0) - gather_s),
        record_s=gather_s,
        publish_s=case.get("sync_s") or 0.0,
        pause_s=(pause or 0.0) / 1000,
    )


# ---- against arithmetic -----------------------------------------------------------------------------------------


UPDATE = Costs(decode_step_s=0.01, decode_answer_s=0.0, train_token_s=0.6 / (8 * 4 * 110))
"""An update of 0.6 s, rollouts of 1 s."""


def test_a_step_is_half_of_the_slowest_answer_and_the_update():
    """docs/benchmarks/pipeline.md: at lag 1 two steps take L + T_train, where L is longer."""
    given = fitting.Fitted(UPDATE, LONG)
    whole, apart = (Split(rollout=1, learner=1, lag=lag, tensor_parallel=1) for lag in (1, 0))
    predicted, alone = advise(config(), given, [whole, apart])
    assert predicted.outcome.train_s == pytest.approx(0.6, rel=0.01)
    assert predicted.roll_s == pytest.approx(0.5, rel=0.03)
    assert predicted.step_s == pytest.approx((1.0 + 0.6) / 2, rel=0.03)
    assert predicted.eta == pytest.approx(0.6 / 0.8, rel=0.03)
    outcome = alone.outcome
    assert outcome.step_s == pytest.approx(1.6, rel=0.03), "without lag nothing overlaps"
    assert outcome.rollout_idle + outcome.learner_idle == pytest.approx(1.0, abs=0.05)


def test_what_engine_and_learner_do_at_once_takes_twice_as_long():
    """At lag 0 they take turns; at a higher one every second of overlap is paid."""
    shared, steps = replace(UPDATE, sharing=2.0), {}
    for lag in (0, 3):
        for name, each in (("own", UPDATE), ("shared", shared)):
            steps[lag, name] = predict(with_lag(config(), lag), (1, 1), each, LONG)
    assert steps[0, "shared"].step_s == pytest.approx(steps[0, "own"].step_s)
    assert steps[3, "shared"].train_wall_s == pytest.approx(1.2, rel=0.05)  # the update alone takes 0.6 s
    assert steps[3, "shared"].step_s == pytest.approx(steps[3, "own"].step_s + 0.6, rel=0.1)


def test_a_batch_waits_for_its_scores_and_a_slow_teacher_is_the_longest_side():
    """Of 8 groups of 4 answers of 100 tokens, and a prompt of 10, all of which end at once."""

    def step_s(lag, scores_s):
        costs = replace(UPDATE, score_token_s=scores_s / (8 * 410))
        return [predict(with_lag(config(), lag), (n, 1), costs, LONG).step_s for n in (1, 2)]

    for with_it, without in zip(step_s(0, 0.2), step_s(0, 0.0), strict=True):
        assert with_it == pytest.approx(without + 0.2, rel=0.02)
    assert step_s(1, 2.0) == pytest.approx([2.0, 2.0], rel=0.05)


# ---- against what was measured ----------------------------------------------------------------------------------

RECORDED = [
    ("case 0.6B@1:3, 32 groups, 512 running", ["0.6B@2:2, 32 groups, 512", "0.6B@3:1, 32 groups, 512"]),
    ("case 1.7B@1:3, 32 groups, 512 running", ["1.7B@3:1, 32 groups, 512", "1.7B@1:1, 64 groups, 192"]),
]


@pytest.mark.parametrize("known, others", RECORDED)
def test_one_recorded_split_predicts_the_others(known, others):
    measured, took = recorded(known)
    fitted = fitting.fit(measured)
    for name in others:
        other, truth = recorded(f"case {name} running")
        fleet = (other.config.num_rollout_servers, other.config.num_learner_ranks)
        outcome = predict(other.config, fleet, fitted.costs, other.workload, steps=12)
        assert outcome.step_s == pytest.approx(truth, rel=0.15), name
        assert (outcome.step_s < took) == (truth < took), name


@pytest.mark.parametrize("known", [known for known, _ in RECORDED])
def test_a_teacher_of_equal_size_on_a_gpu_of_its_own_costs_the_learner_at_most_five_points(known):
    measured, _ = recorded(known)
    costs, fleet = fitting.fit(measured).costs, (measured.config.num_rollout_servers, measured.config.num_learner_ranks)
    both = [costs, replace(costs, score_token_s=costs.prefill_token_s)]
    without, with_it = (predict(measured.config, fleet, each, measured.workload, steps=4) for each in both)
    assert 0 < with_it.learner_idle - without.learner_idle < 0.05


# ---- from a run folder ------------------------------------------------------------------------------------------


def rows(taken, costs=TRUTH, count=20):
    """Rows of metrics.jsonl as a run with these costs would write them, all steps alike, and what it came to."""
    outcome = predict(taken, (taken.num_rollout_devices, taken.num_learner_ranks), costs, ANSWERS, steps=8)
    row = {
        "rollout/idle_ratio": outcome.rollout_idle,
        "timing_s/update_actor": outcome.train_wall_s,
        "timing_s/param_sync": costs.commit_s,
        "weight_sync/seconds": costs.publish_s,
        "response_length/mean": 56.0,
        "response_length/max": 120.0,
        "prompt_length/mean": 10.0,
        "perf/total_num_tokens": taken.trajectories_per_step * 66.0,
        "reward/flat_groups_ratio": 0.0,
    }
    return [{"step": step, "time": 1000 + step * outcome.step_s} | row for step in range(1, count + 1)], outcome


def run_folder(folder, taken, made):
    folder.mkdir()
    (folder / "config.yaml").write_text(loading.dump(taken), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("settings", "sharing", "elsewhere"),
    [
        (SKEWED, 1.0, [((3, 1), 1, 0.05), ((2, 2), 1, 0.12)]),
        (ONE_GPU, fitting.SHARING, [((1, 1), lag, 0.12) for lag in (0, 1, 2)]),
    ],
)
def test_a_run_folder_is_reproduced_and_says_what_another_plan_takes(tmp_path, settings, sharing, elsewhere):
    taken, costs = config(*settings), replace(TRUTH, sharing=sharing)
    measured = sources.of_run(run_folder(tmp_path / "run", taken, rows(taken, costs)[0]))
    fitted = fitting.fit(measured)
    assert fitted.costs.sharing == sharing
    for fleet, lag, error in elsewhere:
        there = with_lag(taken, lag)
        truth = predict(there, fleet, costs, ANSWERS, steps=8)
        found = predict(there, fleet, fitted.costs, measured.workload, steps=8)
        assert found.step_s == pytest.approx(truth.step_s, rel=error), (fleet, lag)


@pytest.mark.parametrize(
    ("settings", "count", "key"),
    [
        (SKEWED, 9, "at least 10"),
        (["placement.device=cpu", "placement.split=3:1"], 20, "placement.device"),
        (["placement.share_gpus=true", "placement.split=2:1"], 20, "share_gpus"),
        ([*SKEWED, "environment.function=env.py:play", "replay.lease_s=120"], 20, "environment.function"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, settings, count, key):
    taken = config(*settings)
    folder = run_folder(tmp_path / "run", taken, rows(config(*SKEWED), count=count)[0])
    with pytest.raises(ConfigError, match=key):
        sources.check(sources.of_run(folder).config)


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Split(rollout=6, learner=2, lag=2, tensor_parallel=2),
                                  Split(rollout=20, learner=12, lag=1, tensor_parallel=4)])  # fmt: skip
def test_the_yaml_makes_this_split(plan, tmp_path):
    file = tmp_path / "plan.yaml"
    tree = loading.read_yaml(
        loading.dump(config("weight_bus.backend=nccl", "network.insecure=true", "rollout.engine=sglang"))
    )
    for section, keys in loading.read_yaml(yaml_of(config(), plan)).items():
        tree[section] |= keys
    if plan.rollout + plan.learner > NODE:
        tree["placement"]["split"] = None
    file.write_text(json.dumps(tree), encoding="utf-8")
    made = loading.load(str(file))
    assert (made.num_rollout_devices, made.num_learner_ranks) == (plan.rollout, plan.learner)
    assert (made.placement.tensor_parallel, made.replay.async_lag) == (plan.tensor_parallel, plan.lag)


def test_every_split_of_a_node_and_whole_nodes_above():
    assert [p.rollout for p in splits(8, lags=[1], tps=[1])] == list(range(1, 8))
    assert [p.rollout for p in splits(8, lags=[1], tps=[2])] == [2, 4, 6]
    many = list(splits(10_000, lags=[1], tps=[1, 2]))
    assert len(many) == 14 and all(p.rollout % NODE == 0 and p.rollout + p.learner == 10_000 for p in many)
    shared = list(splits(4, lags=[0, 1], tps=[1, 2, 3], shared=True))
    assert [(p.rollout, p.learner, p.tensor_parallel, p.lag) for p in shared] == [
        (4, 4, 1, 0), (4, 4, 1, 1), (4, 4, 2, 0), (4, 4, 2, 1)
    ]  # fmt: skip
    assert "share_gpus: true" in yaml_of(config(*ONE_GPU), shared[0])


MODEL = {
    "model_type": "qwen3",
    "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def test_what_does_not_fit_is_refused():
    fitted = fitting.Fitted(TRUTH, ANSWERS)
    candidates = [Split(rollout=8 - n, learner=n, lag=1, tensor_parallel=1) for n in (1, 4)]
    taken = config("placement.gpu_gib=80")
    fits, refused = advise(taken, fitted, candidates, model=MODEL, steps=2)
    assert (fits.split.learner, refused.split.learner) == (4, 1)
    assert "GiB" in refused.refused and refused.outcome is None and fits.eta is not None


def test_the_command(tmp_path, monkeypatch, capsys):
    folder = run_folder(tmp_path / "run", config(*SKEWED), rows(config(*SKEWED))[0])
    out = tmp_path / "plans.json"
    argv = [str(folder), "--lags", "1", "--steps", "4", "--out", str(out), "--teacher", "500:2"]
    monkeypatch.setattr(sys, "argv", ["plan", *argv, "--cost", "publish_s=0.2"])
    assert command.main() == 0
    shown = capsys.readouterr().out
    assert "publish_s" in shown and "--cost" in shown and '  split: "' in shown
    said = json.loads(shown.splitlines()[-1])
    assert said["plans"] == 3 and said["with_teacher"]["learner_idle"] > said["alone"]["learner_idle"]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["constants"]["publish_s"] == 0.2 and len(written["plans"]) == 3
    monkeypatch.setattr(sys, "argv", ["plan", *argv, "--cost", "speed=2"])
    assert command.main() == 2
    assert "--cost speed: there is no such constant" in capsys.readouterr().err
