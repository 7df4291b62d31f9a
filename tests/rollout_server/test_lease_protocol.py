"""The rollout server's end of the channel, message by message. Whole runs: tests/replay/test_simulation.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs import Config
from replay import messages as m
from replay.channel import ChannelError, PeerRefused
from rollout_server.engines.base import Partial
from rollout_server.generate import LeaseFailed
from rollout_server.leases import GoodbyeReceived, HeldLeases
from tests.replay.simulation.samples import make_group, make_result

HELLO = m.Hello(role="rollout_server", name="r0", pid=1, host="h")
CONFIG = Config.model_validate(
    {
        "model": {"path": "none"},
        "data": {"train": "none"},
        "rollout": {"group_size": 2, "max_running": 4},
        "network": {"heartbeat_s": 1.0},
    }
)
CAPACITY = CONFIG.lease_capacity


class Work(list[Any]):
    """Implements `Jobs` and `Working`; keeps what was decided."""

    def begin(self, lease: m.Lease) -> None:
        self.append(("begin", lease.index))

    def abort(self, key: Any) -> None:
        self.append(("abort", key))

    def evaluate(self, lease: m.EvaluationLease) -> None:
        self.append(("evaluate", lease.version, lease.asked))

    def stop(self, part: Any) -> None:
        self.append(("stop", part[0]))

    def let_go(self, version: int) -> None:
        self.append(("let go", version))

    def follow(self, address: str) -> None:
        self.append(("follow", address))

    def running_tokens(self) -> dict[str, int]:
        return {"0/1/1": 5}

    def queued(self) -> set[str]:
        return {"0/2/1"}

    def progress(self, name: str, since: Any) -> Any:
        self.append(("progress", name, list(since)))
        return [Partial() for _ in since]


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def leases(work: Work) -> HeldLeases:
    """Of a server that serves version 3 of incarnation 1."""
    made = HeldLeases(CONFIG, HELLO, work)
    made.went_live(3, 1)
    made.outbox.clear()
    return made


def lease(index: int) -> m.Lease:
    return m.Lease(pass_=0, index=index, attempt=1, min_version=0, lease_s=9.0, seed=1, prompt={})


def part(version: int = 3, asked: str = "x") -> m.EvaluationLease:
    sampling: Any = {"temperature": 1.0, "max_new_tokens": 5, "seed": 1, "prompts": [{}]}
    return m.EvaluationLease(version=version, greedy=True, asked=asked, **sampling)


def result(version: int = 3, asked: str = "x") -> m.EvaluationResult:
    return replace(make_result(version), asked=asked)


def group(index: int, versions: list[int], attempt: int = 1) -> m.Group:
    return make_group([1] * len(versions), index=index, attempt=attempt, versions=np.array(versions, np.int32))


def said(leases: HeldLeases, kind: type) -> list[Any]:
    found = [message for message in leases.outbox if type(message) is kind]
    leases.outbox.clear()
    return found


def beat(leases: HeldLeases, work: Work, now: float) -> list[m.Message]:
    leases.outbox.clear()
    leases.beat(now, {"g": 1.0}, work, sampled=7)
    found = list(leases.outbox)
    leases.outbox.clear()
    return found


def test_hello_comes_first_and_again_until_a_welcome_names_the_bus(work: Work) -> None:
    leases = HeldLeases(CONFIG, HELLO, work)
    leases.join(10.0)
    assert leases.outbox == [HELLO], "and no wish for leases without a version"
    assert [type(x) for x in beat(leases, work, 11.0)] == [m.Heartbeat, m.Renew]
    leases.hear(m.Welcome(incarnation=1, version=0, bus_address=None), 11.5)
    assert leases.activity == "waiting for the learner" and leases.activity_since == 11.5
    assert [type(x) for x in beat(leases, work, 12.1)] == [m.Heartbeat, m.Hello, m.Renew]
    leases.hear(m.Welcome(incarnation=1, version=0, bus_address="tcp://bus"), 12.5)
    assert work == [("follow", "tcp://bus")]
    assert not any(isinstance(x, m.Hello) for now in (15.0, 20.0) for x in beat(leases, work, now))


def test_every_beat_says_the_wish_and_all_that_is_held(leases: HeldLeases, work: Work) -> None:
    for index in (1, 2, 3):
        leases.hear(lease(index), 0.0)
    leases.finish(group(3, [3]))
    leases.hear(part(), 0.0)
    leases.hear(part(2), 0.0)
    leases.evaluated_part(result(2))
    heartbeat, wish, renew = beat(leases, work, 4.0)
    assert isinstance(heartbeat, m.Heartbeat) and heartbeat.gauges == {"g": 1.0}
    assert wish == m.LeaseRequest(capacity=CAPACITY, version=3, incarnation=1)
    assert isinstance(renew, m.Renew) and renew.leases == [[0, 1, 1, 5], [0, 2, 1, 0]]
    assert (renew.queued, renew.sampled, renew.finished) == ([1], 7, [[0, 3, 1]])
    assert renew.evaluations == [[3, "", True, 0, False], [2, "", True, 0, True]]


def test_an_inventory_is_sent_where_nothing_is_held(leases: HeldLeases, work: Work) -> None:
    (renew,) = [x for x in beat(leases, work, 1.0) if isinstance(x, m.Renew)]
    assert (renew.leases, renew.finished, renew.evaluations) == ([], [], [])


def test_a_lease_is_worked_on_once_while_it_runs_and_until_its_group_is_acknowledged(
    leases: HeldLeases, work: Work
) -> None:
    for _ in range(2):
        leases.hear(lease(1), 0.0)
    leases.finish(group(1, [3]))
    leases.hear(lease(1), 1.0)
    assert work == [("begin", 1)]
    leases.hear(m.Ack(pass_=0, index=1, attempt=1, status="accepted"), 2.0)
    leases.hear(lease(1), 3.0)
    assert work == [("begin", 1)] * 2


def test_a_group_is_sent_once_and_again_when_it_was_lost(leases: HeldLeases, work: Work) -> None:
    leases.hear(lease(1), 0.0)
    leases.finish(group(1, [3]))
    assert len(said(leases, m.Group)) == 1
    assert not any(isinstance(x, m.Group) for now in range(5, 50, 5) for x in beat(leases, work, float(now)))
    for now in (60.0, 60.5):
        leases.hear(m.Ack(pass_=0, index=1, attempt=1, status="missing"), now)
        assert len(said(leases, m.Group)) == 1
    leases.hear(m.Ack(pass_=0, index=1, attempt=1, status="accepted"), 61.0)
    leases.hear(m.Ack(pass_=0, index=1, attempt=1, status="missing"), 62.0)
    assert not leases.unacked and not said(leases, m.Group)


def test_a_group_names_the_policies_that_were_live_while_it_was_sampled(leases: HeldLeases) -> None:
    leases.hear(lease(1), 0.0)
    leases.went_live(4, 1)
    leases.hear(lease(2), 0.0)
    leases.went_live(4, 2)
    leases.hear(lease(3), 0.0)
    for index, versions in ((1, [2, 3, 4]), (2, [4, 4]), (3, [4, 4])):
        leases.finish(group(index, versions))
    policies = [sent.policies for sent in said(leases, m.Group)]
    assert policies == [[[1, 2], [1, 3], [1, 4], [2, 4]], [[1, 4], [2, 4]], [[2, 4]]]


def test_a_cancelled_lease_is_aborted_and_given_up_with_its_reason(leases: HeldLeases, work: Work) -> None:
    leases.hear(lease(1), 0.0)
    leases.hear(m.Cancel(pass_=0, index=9, attempt=1, reason="expired"), 1.0)
    leases.hear(m.Cancel(pass_=0, index=1, attempt=1, reason="expired"), 1.0)
    assert work == [("begin", 1), ("abort", (0, 1, 1))]
    leases.give_up((0, 1, 1), "aborted", "why")
    assert said(leases, m.Cancel) == [m.Cancel(pass_=0, index=1, attempt=1, reason="aborted", detail="why")]
    assert not leases.working


def test_a_quarantined_server_wants_no_lease_until_it_serves_again(leases: HeldLeases, work: Work) -> None:
    leases.went_dark("a tensor differs", 5.0)
    assert said(leases, m.LeaseRequest) == [m.LeaseRequest(capacity=0, version=3, incarnation=1)]
    assert leases.version is None and leases.activity.startswith("quarantined") and leases.activity_since == 5.0
    said_in_beat = beat(leases, work, 6.0)
    assert not any(isinstance(x, m.LeaseRequest) for x in said_in_beat)
    assert [x.blocked for x in said_in_beat if isinstance(x, m.Heartbeat)] == ["quarantined"]
    leases.went_live(4, 1)
    assert said(leases, m.LeaseRequest) == [m.LeaseRequest(capacity=CAPACITY, version=4, incarnation=1)]


def test_an_evaluation_runs_once_and_is_answered_with_what_it_came_to(leases: HeldLeases, work: Work) -> None:
    for asked in ("x", "x", "y"):
        leases.hear(part(asked=asked), 0.0)
    assert work == [("evaluate", 3, "x"), ("evaluate", 3, "y")]
    leases.evaluated_part(result(asked="y"))
    assert len(said(leases, m.EvaluationResult)) == 1
    leases.hear(part(asked="y"), 1.0)
    assert len(said(leases, m.EvaluationResult)) == 1 and len(work) == 2
    leases.hear(part(asked="z"), 2.0)
    assert work[2:] == [("evaluate", 3, "z")] and not leases.evaluated


def test_a_closed_evaluation_ends_and_its_weights_go(leases: HeldLeases, work: Work) -> None:
    for version in (2, 3):
        leases.hear(part(version), 0.0)
    leases.evaluated_part(result(2))
    work.clear()
    leases.hear(m.EvaluationClosed(version=3), 1.0)
    assert work == [("stop", 3), ("let go", 3)] and set(leases.evaluated) == {(2, "", True, 0)}
    leases.hear(m.EvaluationClosed(version=2), 2.0)
    assert work[2:] == [("let go", 2)] and not leases.evaluated and not leases.evaluating


def test_what_was_evaluated_of_a_policy_of_before_is_not_told_for_one_of_the_next_learner(
    leases: HeldLeases, work: Work
) -> None:
    for version in (2, 3, 4):
        leases.hear(part(version), 0.0)
    leases.evaluated_part(result(4))
    leases.went_live(3, 1)
    assert len(leases.evaluating) == 2, "the same learner's stay"
    work.clear()
    leases.went_live(3, 2)
    assert work == [("stop", 3)] and set(leases.evaluating) == {(2, "", True, 0)} and not leases.evaluated


def test_an_evaluation_that_fails_says_so_and_may_be_asked_for_again(leases: HeldLeases, work: Work) -> None:
    leases.hear(part(), 0.0)
    leases.failed_part(part(), LeaseFailed("reward_error", "why"))
    (failed,) = said(leases, m.EvaluationFailed)
    assert failed.version == 3 and "why" in failed.reason
    leases.hear(part(), 1.0)
    assert work == [("evaluate", 3, "x")] * 2


def test_replay_decides_by_codes(leases: HeldLeases) -> None:
    leases.hear(m.Refused(reason="any words", code="hello"), 1.0)
    assert [type(x) for x in leases.outbox] == [m.Hello, m.LeaseRequest]
    with pytest.raises(PeerRefused, match="any words"):
        leases.hear(m.Refused(reason="any words"), 2.0)
    with pytest.raises(ChannelError) as raised:
        leases.hear(m.Refused(reason="", code="message"), 2.0)
    assert not isinstance(raised.value, PeerRefused)
    with pytest.raises(GoodbyeReceived) as ended:
        leases.hear(m.Goodbye(reason="over", failed=True), 3.0)
    assert ended.value.failed


def test_an_activity_lasts_from_its_beginning(leases: HeldLeases, work: Work) -> None:
    for now in (4.0, 6.0):
        leases.now_at("generating", now)
    heartbeat = beat(leases, work, 7.0)[0]
    assert isinstance(heartbeat, m.Heartbeat) and (heartbeat.activity, heartbeat.since_s) == ("generating", 3.0)


def test_prefixes_that_a_lease_brings_are_known_to_replay_until_it_starts_anew(work: Work) -> None:
    replay = CONFIG.replay.model_copy(update={"partial_rollouts": True})
    leases = HeldLeases(CONFIG.model_copy(update={"replay": replay}), HELLO, work)
    tokens, logprobs = np.array([5, 6], np.int32), np.full(2, -1.0, np.float32)
    prefix: Any = {"prefix_finished": ["", ""], "prefix_lengths": np.array([2, 0], np.int32)}
    prefix |= {"prefix_token_ids": tokens, "prefix_logprobs": logprobs, "prefix_versions": np.zeros(2, np.int32)}
    leases.hear(replace(lease(1), **prefix), 0.0)
    beat(leases, work, 1.0)
    assert work == [("begin", 1), ("progress", "0/1/1", [2, 0])]
    leases.join(2.0)
    beat(leases, work, 3.0)
    assert work[-1] == ("progress", "0/1/1", [0, 0]), "replay may have started anew"
