"""Evaluations of several sets: their parts and seeds, whose results are taken, and a run resumed with other sets."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.evaluation import MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN, PromptSet
from learner.record.evaluation import Evaluations
from replay import messages as m
from replay.state.evaluation_parts import parts_of
from replay.state.snapshot import snapshot_of, take_over
from tests.replay.simulated_run import answering, bare_service, config, joins, learner, sent
from tests.replay.simulation.samples import make_result
from tests.replay.simulation.world import rows

SETS = {"aime": {"path": "x", "samples": 3, "temperature": 0.5, "max_new_tokens": 9}, "easy": {"path": "y"}}


def prompt_set(name: str = "s", *, samples: int = 4, max_new_tokens: int = 8) -> PromptSet:
    given = {"path": "x", "num_prompts": 500, "temperature": 1.0, "solved_at": 1.0, "greedy": True}
    return PromptSet(name=name, samples=samples, max_new_tokens=max_new_tokens, **given)  # type: ignore[arg-type]


def serving(sets=None, **settings):
    """A service with a learner, and two servers that hold version 0; `a` is the first to evaluate."""
    found = {name: rows(count) for name, count in (sets or {"aime": 2, "easy": 3}).items()}
    made = bare_service(sets=found, **{"data__eval": SETS, "evaluation__sampled": True} | settings)
    learner(made, "l")
    for server in ("a", "b"):
        joins(made, server)
    made.handle("l", m.Evaluate(version=0), 0.0)
    for server in ("a", "b"):
        made.handle(server, m.LeaseRequest(capacity=0, version=0, incarnation=1), 0.0)
    return made


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 20000))
def test_parts_have_every_prompt_once_and_results_that_fit(count, samples, max_new_tokens):
    prompts = rows(count)
    work = parts_of([prompt_set(samples=samples, max_new_tokens=max_new_tokens)], {"s": prompts})
    for greedy in (True, False):
        own = [one for part, one in work.items() if part.greedy == greedy]
        assert [row for one in own for row in one.prompts] == prompts
        assert [one.part.first for one in own] == [prompts.index(one.prompts[0]) for one in own]
        most = max(MAX_TEXT_BYTES, samples * max_new_tokens * TEXT_BYTES_PER_TOKEN)
        assert all(one.num_answers * max_new_tokens * TEXT_BYTES_PER_TOKEN <= most for one in own)


def test_a_lease_has_the_settings_of_its_set_and_a_seed_that_comes_again():
    asked = {(x.set, x.greedy): x for x in sent(serving(), "a", m.EvaluationLease)}
    assert list(asked) == [("aime", True), ("aime", False), ("easy", True), ("easy", False)]
    sampled = asked["aime", False]
    assert (sampled.samples, sampled.temperature, sampled.max_new_tokens, len(sampled.prompts)) == (3, 0.5, 9, 2)
    assert (asked["aime", True].samples, asked["easy", False].samples, asked["easy", False].max_new_tokens) == (1, 1, 8)
    again = {(x.set, x.greedy): x for x in sent(serving(), "a", m.EvaluationLease)}
    assert {key: x.seed for key, x in again.items()} == {key: x.seed for key, x in asked.items()}
    work = parts_of([prompt_set("a"), prompt_set("b")], {"a": rows(1), "b": rows(1)})
    seeds = {one.lease(version, 0).seed for version in (0, 1) for one in work.values()}
    assert len(seeds) == 4, "a version and a set each have a seed, which greedy answers do not need"


def result(name, *, greedy, prompts, samples=1, first=0):
    made = make_result(0, greedy=greedy, n=prompts * samples)
    return replace(made, set=name, samples=samples, first=first)


def test_results_are_taken_by_set_and_the_evaluation_is_closed_with_the_last():
    made = serving()
    for wrong in (
        result("aime", greedy=False, prompts=2),
        result("aime", greedy=False, prompts=6),
        result("gone", greedy=True, prompts=2),
        result("easy", greedy=True, prompts=3, first=1),
        replace(result("aime", greedy=True, prompts=2), rewards=np.array([1, np.nan], np.float32)),
    ):
        made.handle("a", answering(made, wrong), 1.0)
        asked = sent(made, "b", m.EvaluationLease) or sent(made, "a", m.EvaluationLease)
        assert asked and not sent(made, "l", m.EvaluationResult), "refused, and asked of the other server"
        made = serving()
    for name, prompts, greedy, samples in (("easy", 3, False, 1), ("aime", 2, False, 3), ("aime", 2, True, 1)):
        made.handle("a", answering(made, result(name, greedy=greedy, prompts=prompts, samples=samples)), 1.0)
        assert [x.set for x in sent(made, "l", m.EvaluationResult)] == [name]
    assert not sent(made, "l", m.EvaluationClosed)
    made.handle("a", answering(made, result("easy", greedy=True, prompts=3)), 1.0)
    assert [x.reason for x in sent(made, "l", m.EvaluationClosed)] == [""]


def restarted(made, names, *, from_snapshot=False):
    """The same run after a crash of replay, with these sets alone; server `b` is back and holds version 0."""
    sets = {name: rows({"aime": 2, "easy": 3}[name]) for name in names}
    given = {"data__eval": {name: SETS[name] for name in names}}
    again = bare_service(made.journal.crash(None), sets=sets, **given)
    if from_snapshot:
        take_over(again.run, snapshot_of(made.run), 100.0)
    else:
        again.restore(made.journal.records, 100.0)
    again.evaluations.board.server_lost("a")
    learner(again, "l", incarnation=1, now=100.0)
    joins(again, "b", 100.0)
    again.handle("l", m.Evaluate(version=0), 100.0)
    again.handle("b", m.LeaseRequest(capacity=0, version=0, incarnation=1), 100.0)
    return again


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_a_restarted_replay_asks_for_what_is_left_alone(from_snapshot):
    made = serving()
    made.handle("a", answering(made, result("aime", greedy=True, prompts=2)), 1.0)
    again = restarted(made, ["aime", "easy"], from_snapshot=from_snapshot)
    assert [(x.set, x.greedy) for x in sent(again, "l", m.EvaluationResult)] == [("aime", True)]
    asked = [(x.set, x.greedy) for x in sent(again, "b", m.EvaluationLease)]
    assert asked == [("aime", False), ("easy", True), ("easy", False)]


def test_a_run_that_goes_on_with_other_sets_evaluates_those_or_says_why_not():
    made = serving()
    made.handle("a", answering(made, result("aime", greedy=True, prompts=2)), 1.0)
    assert [(x.set, x.greedy) for x in sent(restarted(made, ["aime"]), "b", m.EvaluationLease)] == [("aime", False)]
    again = restarted(made, ["aime"], from_snapshot=True)
    assert "were changed before it was done" in sent(again, "l", m.EvaluationClosed)[-1].reason
    assert not sent(again, "b", m.EvaluationLease)


def resumed(made, prompts):
    """The same run started again with these prompts to evaluate; its learner has asked for version 0 and gone live."""
    again = bare_service(made.journal.crash(None), sets={"": prompts}, data__eval="x", evaluation__sampled=False)
    again.restore(made.journal.records[made.journal.newest_snapshot() :], 100.0)
    joins(again, "b", 100.0)
    learner(again, "l2", now=100.0)
    again.handle("l2", m.Evaluate(version=0), 100.0)
    again.handle("b", m.LeaseRequest(capacity=0, version=0, incarnation=2), 100.0)
    return again


def heard(service, tmp_path, prompts):
    """What the learner makes of the results that it was sent: rows of metrics, with its own prompts."""
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(json.dumps({"prompt": x["prompt"], "answer": x["ground_truth"]}) + "\n" for x in prompts))
    settings = {"data__eval": str(file), "evaluation__sampled": False, "evaluation__every_steps": 1}
    evaluations = Evaluations(config(run__dir=str(tmp_path), run__name="run", **settings))
    closed = {x.version: x.reason for x in sent(service, "l2", m.EvaluationClosed)}
    return list(evaluations.news(sent(service, "l2", m.EvaluationResult), closed))


@pytest.mark.parametrize("journal", ["records", "snapshot"])
def test_a_run_resumed_with_other_prompts_evaluates_its_version_anew(journal, tmp_path):
    made = serving({"": 2}, data__eval="x", evaluation__sampled=False)
    made.handle("a", answering(made, result("", greedy=True, prompts=2)), 1.0)
    assert made.evaluations.board.closed == {0: ""}
    if journal == "snapshot":
        made.journal.append("snapshot", snapshot_of(made.run))
    same = resumed(made, rows(2))
    assert [len(values) for _, _, values in heard(same, tmp_path, rows(2))] and not sent(same, "b", m.EvaluationLease)
    for other in (rows(4), rows(4)[2:]):
        again = resumed(made, other)
        assert not heard(again, tmp_path, other)
        (asked,) = sent(again, "b", m.EvaluationLease)
        assert asked.prompts == other
        again.handle("b", answering(again, result("", greedy=True, prompts=len(other))), 101.0)
        assert [version for version, _, _ in heard(again, tmp_path, other)] == [0]
        once_more = resumed(again, other)
        assert heard(once_more, tmp_path, other) and not sent(once_more, "b", m.EvaluationLease)


def test_a_server_that_stays_up_evaluates_the_prompts_of_now():
    """It has evaluated two prompts before replay was restarted with two others, and sends that again."""
    made = serving({"": 2}, data__eval="x", evaluation__sampled=False)
    (before,) = sent(made, "a", m.EvaluationLease)
    other = rows(4)[2:]
    again = bare_service(made.journal.crash(None), sets={"": other}, data__eval="x", evaluation__sampled=False)
    again.restore(made.journal.records, 100.0)
    learner(again, "l2", now=100.0)
    joins(again, "a", 100.0)
    (asked,) = sent(again, "a", m.EvaluationLease)
    assert asked.prompts == other and asked.asked != before.asked
    old = replace(result("", greedy=True, prompts=2), asked=before.asked)
    again.handle("a", old, 100.0)
    again.handle("l2", m.Evaluate(version=0), 100.0)
    assert not sent(again, "l2", m.EvaluationResult) and again.evaluations.board.open[0].server == "a"
    again.handle("a", replace(old, asked=asked.asked), 101.0)
    assert sent(again, "l2", m.EvaluationResult) and again.evaluations.board.closed == {0: ""}
