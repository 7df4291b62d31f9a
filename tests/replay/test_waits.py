"""What a run waits for has one entry with a code: disk, keys, a silent peer, a reward, an engine, the learner."""

import time

import pytest

from configs.loading import dump
from replay import keys as make_keys
from replay import messages as m
from replay.channel import ChannelError, Dealer, load_keys
from tests.replay.simulated_run import service
from tests.security import served_replay


def waits(made, now=10.0):
    """The last entry of each code."""
    return {wait["code"]: wait for wait in made.report.of(now, ended=None, no_server_since=0.0)["waits"]}


def joined(**gauges):
    """A service with a learner and a server that says these gauges."""
    made = service()
    made.handle("l", m.Hello(role="learner", name="learner-0", pid=1, host="h", digest="0"), 0.0)
    made.handle("a", m.Hello(role="rollout_server", name="rollout-0", pid=2, host="h"), 0.0)
    made.handle("a", m.LeaseRequest(capacity=9, version=0, incarnation=1), 0.0)
    made.handle("a", m.Heartbeat(activity="generating", since_s=0.0, gauges=gauges), 9.0)
    made.handle("l", m.Heartbeat(activity="updating", since_s=0.0), 9.0)
    return made


def test_a_slow_reward_is_named_with_its_workers_and_its_oldest_call():
    assert "reward" not in waits(joined(rewards_waiting=40.0, reward_oldest_s=4.0))
    (wait,) = [waits(joined(rewards_waiting=40.0, reward_workers=2.0, reward_oldest_s=41.0))["reward"]]
    assert (wait["who"], wait["since_s"]) == ("rollout-0", 41.0)
    assert wait["for"].startswith("reward ") and wait["for"].endswith(": 40 answers, 2 workers")


def test_a_status_looks_through_the_slots_as_often_for_many_peers_as_for_few():
    def looks(peers):
        made, looked = joined(), []
        for number in range(peers):
            made.handle(f"{number}", m.Hello(role="rollout_server", name=f"more-{number}", pid=2, host="h"), 9.0)

        class Slots(dict):
            def values(self):
                looked.append(self)
                return super().values()

        made.buffer.slots = Slots(made.buffer.slots)
        return len(waits(made)), len(looked)

    assert looks(2) == looks(20)


@pytest.mark.parametrize(("asks", "key"), [("clock", "unix_s"), ("config", "config")])
def test_who_asks_for_one_thing_gets_nothing_else(asks, key):
    """Each server asks for the clock at every beat while a run is profiled, a host that joins for the configuration."""
    made = joined()
    made.handle("x", m.StatusRequest(about=asks), 9.0)
    (answer,) = [message for identity, message in made.outbox if identity == "x"]
    assert answer.state.keys() == {key}
    assert key != "config" or answer.state["config"] == dump(made.config)


@pytest.mark.parametrize(
    ("gauges", "said"),
    [({"running": 12.0}, "whose engine decodes 12 answers"), ({"rewards_waiting": 8.0}, "where 8 answers are judged")],
)
def test_a_batch_that_is_waited_for_names_the_server_and_what_it_does(gauges, said):
    made = joined(**gauges)
    made.handle("l", m.Take(step=1, rank=0), 9.0)
    assert waits(made)["batch"]["for"] == f"batch 1 (group 0/0 at rollout-0, {said})"


def test_connections_that_are_refused_for_their_keys_are_counted_where_no_server_comes(tmp_path):
    for name in ("keys", "others"):
        make_keys.make(tmp_path / name, ["node1"], force=False)
    make_keys.export(tmp_path / "others", "node1", tmp_path / "node1")
    (tmp_path / "node1" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
    with served_replay.served(load_keys(tmp_path / "keys")) as replay:
        stranger = Dealer(replay.address, "x", m.FROM_REPLAY, keys=load_keys(tmp_path / "node1"))
        with stranger as dealer, pytest.raises(ChannelError):
            dealer.send(m.StatusRequest())
            dealer.poll(20.0)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with Dealer(replay.address, "y", m.FROM_REPLAY, keys=load_keys(tmp_path / "keys")) as dealer:
                dealer.send(m.StatusRequest())
                envelope = dealer.poll(5.0)
            (wait,) = [one for one in envelope.message.state["waits"] if one["code"] == "server"]
            if "were refused for their keys (network.keys)" in wait["for"]:
                break
            time.sleep(0.2)
        assert "connections were refused for their keys (network.keys)" in wait["for"]
