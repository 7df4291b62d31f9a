"""kill -9 of every role, SIGSTOP of a server, Ctrl-C in the middle of a run, and what is left (DESIGN: processes)."""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest

from tests.support.runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def arrivals(run, name):
    """How often a rollout server of this name has said Hello."""
    return len(re.findall(rf"'{name}' \(pid \d+ ", run.log("replay")))


def goes_on(run, steps=3):
    run.wait_for_step(run.steps()[-1]["training/global_step"] + steps)


def other_tokenizer(model, folder):
    """The model with two ids of its vocabulary exchanged."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def ended_by(run, number):
    """End the run by this signal; the step of the whole checkpoint at which it says to go on, and what it repeats."""
    run.process.send_signal(number)
    assert run.wait(120) == 130, run.text()[-3000:]
    last = run.text().splitlines()[-1]
    said = r" received; --resume \S+ goes on at step (\d+)(?: and trains the (\d+) steps)?"
    found = re.search(number.name + said, last)
    assert found is not None, last
    step, repeated = int(found[1]), int(found[2] or 0)
    assert (run.folder / "checkpoints" / f"step_{step}" / "COMPLETE").exists()
    assert run.ledger()[-1]["step"] == step + repeated, last
    return step


def line_of(run):
    """Each step that was made, those that were made twice with equal weights, and no group in two of them."""
    made = {}
    for line in run.ledger():
        before = made.setdefault(line["step"], line)
        assert (before["digest"], before["groups"]) == (line["digest"], line["groups"])
    trained = [tuple(group) for line in made.values() for group in line["groups"]]
    assert len(trained) == len(set(trained)) == 16 * len(made), "nothing is trained twice"
    return made


@pytest.fixture(scope="module")
def story(tmp_path_factory, untrained, zygote):
    """A run that loses all its servers one after another, is helped by another one, and ends by SIGTERM."""
    folder = tmp_path_factory.mktemp("story")
    runs = Runs(folder, untrained, zygote)
    servers = ("rollout.restarts=1", "rollout.restart_backoff_s=0.1", "rollout.wait_for_servers_s=60")
    settings = (*servers, "network.silent_after_s=5")
    run = runs(*settings, "checkpoint.every_steps=0", split="2:1", steps=10_000)
    run.wait_until(lambda: len(run.steps()) > 2 and run.steps()[-1].get("rollout/servers") == 2, "two servers")
    model = other_tokenizer(untrained.folder / "model", folder / "other-tokenizer")
    run.stranger = runs.server(run, "stranger", settings=("--model", str(model)))
    run.stranger_code = run.stranger.wait(150)
    for name, first in {"rollout-0": signal.SIGKILL, "rollout-1": signal.SIGSTOP}.items():  # then there is no other
        before = arrivals(run, name)
        os.kill(run.pids(f"--server-name {name}")[-1], first)
        run.wait_until(lambda n=name, b=before: arrivals(run, n) > b, f"the return of {name}")
        goes_on(run)
        run.kill(f"--server-name {name}")
        run.wait_until(lambda n=name: re.search(rf"{n} .*no restart left", run.text()), f"the end of {name}")
        if name == "rollout-0":
            goes_on(run)  # with the other one
    rescuer = runs.server(run, "by-hand")
    run.wait_until(lambda: run.steps()[-1].get("rollout/groups/by-hand", 0) > 0, "a group of the new server")
    goes_on(run)
    run.checkpoint = ended_by(run, signal.SIGTERM)
    rescuer.process.kill()
    rescuer.process.wait(10)
    run.all_ended = run.nothing_left()
    yield run
    runs.close()


def test_a_killed_rollout_server_is_restarted_and_nothing_is_trained_twice(story):
    assert re.search(r"rollout-0 \(pid \d+\) died: killed by SIGKILL.*; restart 1 of 1", story.text())
    assert re.search(r"(it goes|which go) to other servers", story.log("replay"))
    groups = story.groups()
    assert len(groups) == len(set(groups)) == 16 * len(story.ledger())


def test_the_only_rollout_server_is_replaced_where_it_stands_still(story):
    (line,) = re.findall(r"rollout-1 \(pid \d+\) says nothing to replay.*", story.text())
    assert "(network.silent_after_s): ended by SIGKILL [silent]" in line and "; restart 1 of 1" in line


def test_without_restarts_the_run_goes_on_with_another_server(story):
    alone = [row for row in story.steps() if row.get("rollout/servers") == 1]
    assert re.search(r"rollout-0 .*no restart left \(rollout.restarts 1\)", story.text())
    assert alone and len({row["rollout/groups/rollout-1"] for row in alone if "rollout/groups/rollout-1" in row}) > 1


def test_without_any_server_the_run_waits_by_name_and_goes_on_with_a_new_one(story):
    assert re.search(r"rollout-1 .*waits 60 s for one \(rollout.wait_for_servers_s\)", story.text())
    assert story.steps()[-1]["rollout/groups/by-hand"] > 0


def test_a_signal_ends_everything_and_leaves_a_checkpoint(story):
    assert story.all_ended and story.checkpoint > 0


def test_a_rollout_server_with_another_tokenizer_is_refused_and_the_run_goes_on(story):
    said = story.stranger.text()
    assert story.stranger_code != 0 and "Traceback" not in said, said
    assert re.search(r"refused 'stranger': tokenizer .*\[SLIP-NET-01\]$", said.strip().splitlines()[-1]), said
    assert re.search(r"refused 'stranger' \(pid \d+ on \S+\): tokenizer ", story.log("replay"))


def test_an_interrupted_run_is_resumed_and_trains_nothing_twice(story, launch):
    done = len(story.ledger())
    run = launch.resume(story.folder)
    run.wait_until(lambda: len(run.ledger()) > done + 3, "four steps", 120)
    ended_by(run, signal.SIGINT)
    made, again = line_of(run), run.ledger()[done:]
    assert {line["incarnation"] for line in again} == {2} and again[0]["step"] == story.checkpoint + 1
    rows = [row["training/global_step"] for row in run.steps()]  # the end may fall between a step's line and its row
    assert sorted(made) == list(range(1, max(made) + 1)) and rows in (sorted(made), sorted(made)[:-1])


@pytest.mark.slow
def test_a_run_that_signals_end_five_times_loses_nothing_and_trains_nothing_twice(launch):
    """At random moments of random steps, by either signal; each resume begins where the last line has said."""
    rng, begins, steps = random.Random(11), 1, 80
    run = launch("checkpoint.every_steps=4", "data.shuffle=false", steps=steps)
    for number in rng.choices((signal.SIGINT, signal.SIGTERM), k=5):
        done, more = len(run.ledger()), rng.randint(1, 5)
        run.wait_until(lambda n=done + more, run=run: len(run.ledger()) > n, "steps", 150)
        assert run.ledger()[done]["step"] == begins
        time.sleep(rng.random())
        begins = ended_by(run, number) + 1
        print(f"after {run.ledger()[-1]['step']} steps:", run.text().splitlines()[-1])
        run = launch.resume(run.folder)
    assert run.wait(300) == 0 and run.nothing_left(), run.text()[-3000:]
    made = line_of(run)
    print(run.text().splitlines()[-1], f"; {len(run.ledger()) - steps} steps were made twice, with equal weights")
    assert sorted(made) == [row["training/global_step"] for row in run.steps()] == list(range(1, steps + 1))
    trained = sorted(tuple(group) for line in made.values() for group in line["groups"])
    assert trained == [(0, index) for index in range(16 * steps)], "every prompt of the file in its turn"


FAULTS = {
    "wire": ("3", r"'wire'.*(embed_tokens|proj|norm).*\[corrupt\]"),
    "live": ("5", r"'live'.*(q_proj|k_proj|v_proj).*\[corrupt\]"),
    "die": ("7", r"'die'.*\[(closed|silent)\]"),
}
"""What a server does to itself, in the how manieth version that it is sent, and how the learner says it."""


DEADLINE_S = 10


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory, untrained, zygote):
    """A run whose servers plant a fault in themselves, each another one; at last its launcher is killed."""
    folder = tmp_path_factory.mktemp("spoilt")
    runs = Runs(folder, untrained, zygote)
    deadlines = ("weight_bus.collective_timeout_s=2", f"weight_bus.deadline_s={DEADLINE_S}")
    # at lag 0 no newer version takes the place of one in which a fault was planted, and mends it unseen
    run = runs(*deadlines, "replay.async_lag=0", split="1:2", steps=10_000)
    program = "tests.e2e.faulty_rollout_server"
    servers = {fault: runs.server(run, fault, program, (fault, when)) for fault, (when, _) in FAULTS.items()}
    run.planted, run.servers = {}, servers

    def planted():
        found = {fault: re.search(rf"planting {fault} in v(\d+)", server.text()) for fault, server in servers.items()}
        run.planted = {fault: int(match[1]) for fault, match in found.items() if match}
        return len(run.planted) == len(FAULTS)

    run.wait_until(planted, "all faults", 200)
    newest = max(run.planted.values())

    def is_whole(row):
        return row.get("weight_sync/version", -1) > newest and row["weight_sync/digests_equal"]

    run.wait_until(lambda: any(map(is_whole, run.steps())), "a version that all who live hold")
    run.healed = next(row for row in run.steps() if is_whole(row))
    for server in servers.values():
        server.process.kill()
    run.before = run.pids()
    run.process.kill()
    run.process.wait()
    run.all_ended = run.nothing_left()
    yield run
    runs.close()


def test_kill_9_of_the_launcher_leaves_no_process_behind(spoilt):
    assert len(spoilt.before) >= 4, "replay, two ranks and a rollout server"
    assert spoilt.all_ended


def test_planted_faults_on_the_bus_are_named_and_the_next_version_is_served(spoilt):
    """A flipped byte on the wire, a flipped byte in the live fused qkv tensor, a death in the broadcast."""
    run = spoilt
    steps = run.steps()
    assert run.healed["weight_sync/members"] == 3, "of four servers one died"
    for fault, (_, words) in FAULTS.items():
        lines = [line for line in run.log("learner-0").splitlines() if re.search(words, line)]
        assert lines and f"v{run.planted[fault]}" in lines[0], (fault, run.log("learner-0")[-3000:])
    while_corrupt = re.findall(r"asked for \d+ leases and sampled \d+ tokens while corrupt", run.servers["live"].text())
    assert while_corrupt == ["asked for 0 leases and sampled 0 tokens while corrupt"]
    waited = max(row["timing_s/publish_wait"] for row in steps)
    assert waited <= DEADLINE_S + 5, "no step waits longer than the deadline, and what a busy machine adds"
    assert all(set(row["training/lag_histogram"]) == {"0"} for row in steps)
    groups = run.groups()
    assert len(groups) == len(set(groups))
