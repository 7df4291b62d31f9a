"""One small run, looked at from all sides; and what goes on from its folder."""

import json
import os
import shutil
import statistics
from pathlib import Path

import pytest

from learner.record.metrics import evaluation_scores
from learner.record.summary import summarize
from slipstream.runtime.vitals.catalogue import catalogue, find
from tests.support.runs import ROOT, Runs
from tests.support.traces import parsed, problems

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 5
HOOK = ROOT / "tests" / "security" / "audit"
PROCESSES = {"launcher", "learner-0", "learner-1", "replay", "rollout-0"}
SCORE = "val-core/all/greedy"
PASS = "val-core/few/reward/pass@4"
LAG_0 = ("replay.async_lag=0", "rollout.temperature=0.7", "tracking.save_rollouts_every=1", "learner.adam_epsilon=1e-6")
"""AdamW divides by the size of a gradient. Where terms cancel to 1e-9, as for a token that no answer has, what is left
is the rounding of the order in which ranks add up, and an epsilon below it makes steps of that."""


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    """Folder to which every process that a test of this file starts reports code that it makes of data."""
    folder = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_AUDIT", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")])))
        yield folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory, sort6, zygote, audit):
    """A run on two ranks that has finished: evaluations of two sets, checkpoints, trackers, plot, every trajectory."""
    runs = Runs(tmp_path_factory.mktemp("clean"), sort6, zygote)
    trackers = ("tracking.plot=true", "tracking.trackers=[tensorboard]", "tracking.prometheus=127.0.0.1")
    trackers += ("tracking.profile=2:5",)
    trackers += ("limits.growth_window_s=12", "network.heartbeat_s=0.2")
    best = ("checkpoint.keep_best=1", f"checkpoint.best_metric={SCORE}")
    file, long = sort6.folder / "eval.jsonl", tmp_path_factory.mktemp("data") / "one_too_long.jsonl"
    rows = file.read_text().splitlines()
    long.write_text("\n".join([*rows[:5], json.dumps({"prompt": "4" * 99, "answer": ""}), *rows[6:]]) + "\n")
    sets = f"data.eval={{all: {{path: {long}, sampled: false}}, few: {{path: {file}, samples: 4, num_prompts: 16}}}}"
    settings = (*LAG_0, *trackers, *best, sets, "evaluation.every_steps=2", "checkpoint.every_steps=2")
    run = runs(*settings, steps=STEPS, split="1:2", name="clean")
    assert run.wait() == 0, run.text()[-3000:]
    yield run
    runs.close()


def test_a_run_trains_evaluates_checkpoints_and_leaves_nothing_behind(clean):
    assert f"finished {STEPS} steps" in clean.text()
    assert [row["training/global_step"] for row in clean.steps()] == list(range(1, STEPS + 1))
    groups = clean.groups()
    assert len(groups) == len(set(groups)) == STEPS * 16
    syncs = [row for row in clean.rows() if "weight_sync/digests_equal" in row]
    assert all(row["weight_sync/digests_equal"] for row in syncs) and syncs[-1]["weight_sync/members"] == 1

    evaluated = {row["version"] for row in clean.rows() if any(key.startswith("val-core/") for key in row)}
    assert evaluated == {0, 2, 4, STEPS}
    sizes = {path.name: len(path.read_text().splitlines()) for path in (clean.folder / "evaluations").iterdir()}
    kinds = {"all_greedy": 64, "few_greedy": 16, "few_sampled": 64}
    assert sizes == {f"version_{version}_{kind}.jsonl": n for version in evaluated for kind, n in kinds.items()}

    checkpoints = clean.folder / "checkpoints"
    scores = {row["version"]: row[SCORE] for row in clean.rows() if row.get("version", 0) > 0 and SCORE in row}
    best = max(scores, key=lambda version: (scores[version], version))
    found = {path.name for path in checkpoints.glob("step_*")}
    assert found == {"step_4", "step_5", f"step_{best}"}, "checkpoint.keep is 2, and the best"
    assert (checkpoints / "best").resolve().name == f"step_{best}"
    written = [row for row in clean.rows() if "checkpoint/seconds" in row]
    assert {2, STEPS} <= {row["checkpoint/step"] for row in written} <= {2, 4, STEPS}
    assert all(row["checkpoint/copy_seconds"] < row["checkpoint/seconds"] for row in written)
    assert (clean.folder / "plots" / "summary.png").stat().st_size > 10_000
    assert list((clean.folder / "tensorboard").glob("events.*"))
    assert clean.nothing_left()


def test_a_window_of_steps_is_traced_in_every_process(clean):
    found = parsed(clean.folder / "trace" / "steps_2_4.json.gz")
    assert problems(found.spans) == []
    first, last = (found.span("learner-0", "steps", f"step {step}") for step in (2, 4))
    for rank in (0, 1):
        phases = found.of(f"learner-{rank}", "steps")
        assert [event["name"] for event in phases if event["name"].startswith("step")] == ["step 2", "step 3", "step 4"]
        inside = ["wait_batch", "update_actor", "publish_wait", "param_sync"]
        assert [event["name"] for event in phases if event["name"] in inside] == inside * 3
        torch = [event for event in found.spans if found.lanes[event["pid"], event["tid"]][1].startswith("torch: ")]
        updates = [event for event in phases if event["name"] == "update_actor"]
        own = [event for event in torch if found.lanes[event["pid"], event["tid"]][0] == f"learner-{rank}"]
        products = [event["ts"] for event in own if event["name"] == "aten::mm"]
        limits = [(update["ts"] - 2000, update["ts"] + update["dur"] + 2000) for update in updates]
        assert products and all(any(begin < at < end for begin, end in limits) for at in products)
    sends = [event["name"] for event in found.of("learner-0", "weight bus: send")]
    assert sends.index("send of version 2") < sends.index("apply of version 2") < sends.index("send of version 3")
    loads = [event for event in found.of("rollout-0", "weights") if event["name"] == "load"]
    for version in (2, 3):  # one clock: an engine loads once the first bucket is out, and before it has applied
        spans = [f"{what} of version {version}" for what in ("send", "apply")]
        sent, applied = (found.span("learner-0", "weight bus: send", span) for span in spans)
        begin, end = sent["ts"] - 1000, applied["ts"] + applied["dur"] + 1000
        assert [load for load in loads if begin < load["ts"] and load["ts"] + load["dur"] < end], version
    batches = [event["name"] for event in found.of("replay", "batches")]
    assert [name for name in batches if "goes out" in name] == [f"batch {step} goes out" for step in (2, 3, 4)]
    for process, lane in (("rollout-0", "groups 1"), ("rollout-0", "state"), ("replay", "leases of rollout-0 1")):
        own = found.of(process, lane)
        assert own and own[-1]["ts"] > first["ts"] and own[0]["ts"] < last["ts"] + last["dur"], (process, lane)
    assert "longest bubble: learner-0 waits " in clean.text()
    for process in ("learner-0", "learner-1", "rollout-0"):  # of one machine: measured all the same, and equal
        lines = (clean.folder / "trace" / f"{process}.jsonl").read_text().splitlines()
        clocks = [line["clock"] for line in map(json.loads, lines) if "clock" in line]
        assert clocks and all(abs(clock["ahead_s"]) <= clock["error_s"] + 1e-3 for clock in clocks), process


def test_the_reference_has_every_metric_of_the_run_and_the_run_all_that_are_always_there(clean):
    """The window of growth is short, so that processes are looked at several times a second."""
    names = {name for row in clean.rows() for name in row} - {"step", "version", "set", "time", "final"}
    assert {name for name in names if find(name) is None} == set()
    always = [metric for metric in catalogue() if not metric.when]
    assert [metric.name for metric in always if not any(metric.variables(name) is not None for name in names)] == []
    last = clean.steps()[-1]
    roles = {name.rpartition("/")[2] for name in last if name.startswith("vitals/memory_gib/")}
    assert roles == {"learner", "replay", "rollout", "reward"}
    written = {path.stem for path in (clean.folder / "vitals").iterdir()}
    assert written == {"launcher", "replay", "learner-0", "learner-1", "rollout-0"}
    assert list((clean.folder / "prometheus").iterdir()) == [], "each had an endpoint, and took its target back"
    assert 0 < last["perf/communication_share"] < 1
    assert 0 < last["weight_sync/update_latency_s"] < 60 and last["weight_sync/update_latency_version"] >= STEPS - 2


def test_every_set_is_measured_from_the_rows_that_were_written(clean):
    measured = {(row["version"], row["set"]): {} for row in clean.rows() if "set" in row}
    for row in clean.rows():
        measured.get((row.get("version"), row.get("set")), {}).update(row)
    assert measured.keys() == {(version, name) for version in (0, 2, 4, STEPS) for name in ("all", "few")}
    for (version, name), numbers in measured.items():
        answers: dict[int, list[float]] = {}
        mode = "sampled" if name == "few" else "greedy"
        lines = (clean.folder / "evaluations" / f"version_{version}_{name}_{mode}.jsonl").read_text().splitlines()
        for row in map(json.loads, lines):
            if "error" not in row:
                answers.setdefault(row["index"], []).append(row["reward"])
        mean, some = (statistics.fmean(map(of, answers.values())) for of in (statistics.fmean, max))
        if name == "all":
            assert numbers["val-core/all/greedy"] == pytest.approx(mean) and 5 not in answers
            assert numbers["val-aux/all/greedy/not_scored"] == 1.0, "one prompt is too long, and the others are scored"
        else:
            assert numbers["val-core/few/reward/mean@4"] == pytest.approx(mean), "sort6 has rewards 0 and 1"
            assert numbers["val-core/few/reward/pass@1"] == pytest.approx(mean)
            assert numbers["val-core/few/reward/pass@4"] == pytest.approx(some) and some > mean
    assert clean.text().count("63 of 64 answers scored, 1 prompt_too_long: the prompt has 99 tokens") == 4
    summary = summarize(clean.folder, None)
    assert summary["greedy_after"] is not None and summary["sets"]["few/pass@4"][0] == measured[0, "few"][PASS]


def test_the_exported_folder_answers_as_the_last_evaluation_says(clean):
    from slipstream.view.check_export import check

    result = check(clean.folder)
    assert (result["step"], result["prompts"], result["left_out"]) == (STEPS, 63 + 16, {"prompt_too_long": 1})
    assert len(result["different"]) <= 1, result["different"]


@pytest.mark.parametrize("split", [pytest.param("1:1", marks=pytest.mark.slow), "1:2"])
def test_five_lag_0_steps_equal_the_reference_loop(clean, launch, split):
    """Parity of the whole multi-process system with a plain single-process loop, from the same groups."""
    run = clean if split == "1:2" else launch(*LAG_0, steps=STEPS)
    assert run.wait() == 0, run.text()[-3000:]
    expected, trained = reference_loop(run)
    worst = max(float((trained[name] - tensor).abs().max()) for name, tensor in expected.items())
    print(f"five lag-0 steps, split {split}: max |difference of a parameter| = {worst:.3g}")
    assert worst <= (1e-6 if split == "1:1" else 1e-5), worst

    for row in run.steps():
        assert row["training/lag_histogram"].keys() == {"0"}
        assert row["training/rollout_logprobs_diff_max"] <= 1e-4
        assert row["training/rollout_logprobs_diff_mean"] <= 1e-6


def reference_loop(run):
    """Weights that a plain loop makes of the run's groups, and those that the run made."""
    from safetensors.torch import load_file

    from configs import load
    from tests.learner.reference import Recorded, train

    config = load(run.folder / "config.yaml")
    last = config.learner.total_steps
    same = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "reward")
    steps = []
    for step in range(1, last + 1):
        files = sorted((run.folder / "rollouts" / f"step_{step}").glob("rank_*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        groups = [row["group"][0] * 10**6 + row["group"][1] for row in rows]
        steps.append([Recorded(**{k: row[k] for k in same}, group=n) for row, n in zip(rows, groups, strict=True)])
    expected = train(Path(config.model.path), steps, config)
    trained = load_file(run.folder / "checkpoints" / f"step_{last}" / "hf" / "model.safetensors")
    return expected, trained


def test_a_resumed_run_goes_on_from_the_newest_whole_checkpoint_and_makes_no_code(clean, launch, tmp_path, audit):
    """The newest is cut short: the steps since the one before come again from the journal, with the same weights."""
    folder = tmp_path / "resumed"
    shutil.copytree(clean.folder, folder)
    cut = folder / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    run = launch.resume(folder, "--steps", str(STEPS + 2))
    assert run.wait() == 0, run.text()[-3000:]
    assert f"checkpoint step_{STEPS} is passed over: hf/model.safetensors has " in run.text()
    assert "the learner goes on from step_4" in run.text()
    assert [row["training/global_step"] for row in run.steps()] == list(range(1, STEPS + 3))
    before, after = clean.ledger(), run.ledger()[STEPS:]
    assert [(line["step"], line["incarnation"]) for line in after] == [(step, 2) for step in (5, 6, 7)]
    assert [after[0][key] for key in ("digest", "groups")] == [before[4][key] for key in ("digest", "groups")]
    trained = [tuple(group) for line in [*before[:4], *after] for group in line["groups"]]
    assert len(trained) == len(set(trained)) == (STEPS + 2) * 16

    assert told(audit, "caught") == []
    for each in (clean, run):
        noted = {path.stem: json.loads(path.read_text())["pid"] for path in (each.folder / "processes").glob("*.json")}
        assert {name for name, pid in noted.items() if (audit / f"live-{pid}").exists()} == PROCESSES
    assert any("rollout_server.tasks.rewards.worker" in record["command"] for record in told(audit, "live"))
    # the resume read a checkpoint, whose metadata is a pickle of ours: the hook sees such things
    allowed = {(record["event"], record["where"]) for record in told(audit, "allowed")}
    assert ("pickle.find_class", "/torch/distributed/checkpoint/") in allowed


def told(folder, kind):
    """What the audit hook of every process has written."""
    return [json.loads(line) for file in sorted(folder.glob(f"{kind}-*")) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_of_no_steps_evaluates_the_model_and_ends(launch):
    run = launch("evaluation.every_steps=1", "evaluation.samples=2", "evaluation.num_prompts=8", steps=0)
    assert run.wait() == 0, run.text()[-3000:]
    measured = {mode: row["version"] for row in run.rows() for mode in evaluation_scores(row)}
    assert measured == dict.fromkeys(("greedy", "mean@2", "pass@1", "pass@2"), 0) and not run.steps()
    assert {path.name for path in (run.folder / "evaluations").iterdir()} == {
        "version_0_greedy.jsonl",
        "version_0_sampled.jsonl",
    }
