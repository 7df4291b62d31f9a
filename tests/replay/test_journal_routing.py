"""Routing beside the journal: there before its record, as long as its record, and never another group's."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay import messages as m
from replay import routing
from replay.decisions.leasing import LeaseScheduler
from replay.journal import JournalDamaged, JournalFull, JournalReader, JournalWriter
from replay.journal.format import path_apart
from replay.player import PlayedJournal
from replay.state.peers import Peers
from replay.state.run import RunState
from slipstream.families.experts import Experts
from tests.replay.journal_files import flush, frames_of, group
from tests.replay.simulated_run import bare_service, config, group_message, joins, learner, lease, sent

EXPERTS = Experts(layers=2, chosen=2, number=6)


def routed(index: int) -> m.Group:
    """The answer has 2 tokens behind a prompt of 3, so 4 positions were read."""
    made = group(index)
    rows = np.random.default_rng(index).integers(0, 6, (4, 2, 2)).astype(np.uint8)
    return replace(made, **routing.packed([made.prompt_ids], [made.token_ids], [rows]))


def keep(writer: JournalWriter, given: m.Group) -> m.Group:
    """Append its record as replay does; what replay holds of it."""
    held = writer.set_apart(given)
    assert not held.routing.size and not held.prompt_routing.size and held.routing_place
    writer.append("group", {"group": [0, given.index]}, frames_of(held))
    return held


def same(one: m.Group, other: m.Group) -> bool:
    names = ("routing", "prompt_routing", "routing_sums", "token_ids")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and not one.routing_place


@pytest.mark.parametrize("fsync", ["every", "interval", "never"])
def test_a_group_gets_its_routing_back_before_and_after_it_is_written(tmp_path: Path, fsync: Any) -> None:
    writer = JournalWriter(tmp_path, "run", fsync=fsync)
    given = [routed(index) for index in range(4)]
    held = [keep(writer, one) for one in given[:2]]
    assert not path_apart(tmp_path, 1).exists()
    assert all(same(writer.whole(one), it) for one, it in zip(held, given, strict=False)), "before it is written"
    flush(writer)
    writer.begin_segment()
    held += [keep(writer, one) for one in given[2:3]]
    flush(writer)
    before = sum(path_apart(tmp_path, segment).stat().st_size for segment in (1, 2))
    assert before == 3 * 4 * EXPERTS.token_bytes and writer.size_bytes > before
    writer.close()
    reader = JournalReader(tmp_path)
    records = [record for record in reader.records() if record.kind == "group"]
    writer = JournalWriter(tmp_path, "run", fsync=fsync, after=reader)
    held.append(keep(writer, given[3]))  # behind what is there
    flush(writer)
    read = [reader.read(record.location) for record in records]
    for one, it in zip([*held, *read], [*given, *given], strict=False):
        assert isinstance(one, m.Group)
        assert same(writer.whole(one), it) and same(PlayedJournal(tmp_path).whole(one), it)
        assert routing.problem_with_group(one, EXPERTS) == "its routing is said to be in the journal"
    writer.release(2)
    writer.sync()
    writer.write()
    assert [path_apart(tmp_path, segment).exists() for segment in (1, 2)] == [False, True]
    writer.close()


@pytest.mark.parametrize(("fsync", "expected"), [("every", True), ("interval", True), ("never", False)])
def test_names_of_files_of_routing_are_durable_as_those_of_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: Any, expected: bool
) -> None:
    writer, synced, sync = JournalWriter(tmp_path, "run", fsync=fsync), set[str](), os.fsync

    def noted(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    keep(writer, routed(0))
    flush(writer)
    writer.close()
    assert ({str(tmp_path), str(path_apart(tmp_path, 1).parent)} <= synced) == expected


def test_a_disk_that_is_full_takes_the_record_after_the_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, real, full = JournalWriter(tmp_path, "run", fsync="every"), os.pwrite, [True]

    def pwrite(file: int, data: Any, offset: int) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    given = routed(1)
    held = keep(writer, given)
    writer.submit()
    with pytest.raises(JournalFull, match=r"000001\.ids: 16 bytes of routing cannot be written"):
        writer.write()
    assert "group" not in [record.kind for record in JournalReader(tmp_path).records()]
    full[0] = False
    flush(writer)
    assert "group" in [record.kind for record in JournalReader(tmp_path).records()]
    assert same(PlayedJournal(tmp_path).whole(held), given)
    writer.close()


def test_routing_that_is_not_there_whole_is_damage_by_name(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "run", fsync="never")
    held = keep(writer, routed(5))
    writer.close()
    path = path_apart(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match=r"000001\.ids: byte 0: the routing of group \(0, 5\) is missing: 15 of"):
        PlayedJournal(tmp_path).whole(held)
    path.unlink()
    with pytest.raises(JournalDamaged, match="No such file"):
        PlayedJournal(tmp_path).whole(held)


def test_replay_takes_no_other_routing_than_its_model_has_and_trains_what_the_journal_keeps(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "run", fsync="never")
    made = bare_service(journal)
    learner(made, "l")
    joins(made, "a")
    told = {"experts": EXPERTS.told()}
    for wanted, experts in ((True, EXPERTS), (False, None)):
        peers = Peers(told)
        run = RunState(config(algorithm__routing_replay=wanted), made.run.source, journal, parts=())
        assert LeaseScheduler(run, peers, fail=print).experts == experts
    made.leasing.experts = EXPERTS
    given: dict[tuple[int, int], m.Group] = {}
    made.handle("l", m.Take(step=1, rank=0), 0.0)
    for number, each in enumerate(lease(made, capacity=50)):
        plain = group_message(each, [0])
        if not number:
            made.handle("a", plain, 0.0)
            assert "routing of 0 bytes" in sent(made, "a", m.Ack)[0].reason
        given[each.pass_, each.index] = with_routing(plain)
        made.handle("a", given[each.pass_, each.index], 0.0)
    again = lease(made, capacity=1)  # of the prompt that was refused
    for each in again:
        given[each.pass_, each.index] = with_routing(group_message(each, [0]))
        made.handle("a", given[each.pass_, each.index], 0.0)
    held = [slot.group for slot in made.run.buffer.slots.values() if slot.group is not None]
    assert all(one.routing_place and not one.routing.size for one in held)
    (part,) = sent(made, "l", m.Batch)
    assert routing.problem_with_batch(part, EXPERTS) is None
    expected = [given[pass_, index] for pass_, index in part.group_ids]
    assert sorted(part.routing_sums.tolist()) == sorted(np.concatenate([g.routing_sums for g in expected]).tolist())
    journal.close()


def with_routing(plain: m.Group) -> m.Group:
    answers = np.split(plain.token_ids, np.cumsum(plain.lengths)[:-1])
    rng = np.random.default_rng(plain.index)
    rows = [rng.integers(0, 6, (plain.prompt_ids.size + a.size - 1, 2, 2)).astype(np.uint8) for a in answers]
    return replace(plain, **routing.packed([plain.prompt_ids], answers, rows))
