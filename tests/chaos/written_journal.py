"""Journals written by hand, from the format alone, so that a test can break any rule of the checker."""

import itertools
import json
import struct
import zlib

import msgpack
import numpy as np
import yaml

STEPS, GROUPS_PER_STEP, LAG = 4, 2, 1


def wire_message(version, *, mask=(1, 1, 1), kind="Group"):
    """Frames of a message with 3 tokens of `version` (an int, or one for each token) and the checksum of the wire."""
    columns = {
        "loss_mask": np.array(mask, dtype="<u1"),
        "versions": np.broadcast_to(np.array(version, dtype="<i4"), (3,)),
    }
    described = [[name, str(column.dtype), [column.size]] for name, column in columns.items()]
    frames = [np.ascontiguousarray(column).tobytes() for column in columns.values()]
    fields = {"schema": 2, "run": "r", "kind": kind, "seq": 1, "fields": {}, "arrays": described, "crc": b"\0" * 4}
    header = msgpack.packb(fields)[:-4]
    crc = zlib.crc32(header)
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return [header + struct.pack("<I", crc), *frames]


def record(kind, number, fields, frames=()):
    meta = msgpack.packb([kind, number, fields, [len(frame) for frame in frames]])
    return b"SJR1" + struct.pack("<II", len(meta), zlib.crc32(meta)) + meta + b"".join(frames)


class Journal:
    """Records in memory, written to a run folder at the end; `ledger` and `acks` beside them."""

    def __init__(self):
        self.files, self.ledger, self.acks, self.metrics = [], [], [], []
        self.metrics.append({"version": STEPS, "final": True})  # no row of a step
        self.on_stale, self.tail = "wait", b""
        self.new_file()

    def add(self, kind, *, frames=(), **fields):
        self.files[-1].append((kind, fields, frames))

    def new_file(self):
        self.files.append([])
        self.add("segment", format=1, number=len(self.files), run_id="r")

    def at(self, kind, nth=0):
        """(records of a file, index) of the nth record of a kind."""
        return [(records, i) for records in self.files for i, r in enumerate(records) if r[0] == kind][nth]

    def edit(self, kind, nth, frames=None, **fields):
        records, i = self.at(kind, nth)
        old = records[i]
        records[i] = (kind, {**old[1], **fields}, old[2] if frames is None else frames)

    def learner(self, incarnation, version):
        self.add("learner", incarnation=incarnation, version=version, world_size=1, bus_address="tcp://127.0.0.1:1")

    def lease(self, group, attempt=1):
        self.add("lease", group=list(group), attempt=attempt, min_version=0, server="rollout-0")

    def group(self, group, version, attempt=1, **message):
        frames = wire_message(version, **message)
        self.add("group", group=list(group), attempt=attempt, server="rollout-0", frames=frames)
        self.ack(group, attempt)

    def ack(self, group, attempt=1, status="accepted"):
        self.acks.append({"event": "ack", "group": list(group), "attempt": attempt, "status": status})

    def step(self, step, incarnation, groups, *, again=False):
        made = {"step": step, "incarnation": incarnation}
        took, proof = {"groups": [list(group) for group in groups]}, {"digest": f"digest-{step}"}
        self.add("take", **made, **took)
        self.add("commit", **made, **proof, again=again)
        self.ledger.append({**made, **took, **proof})
        self.metrics.append({"training/global_step": step, "training/lag_histogram": {"0": 5, str(LAG): 1}})

    def write(self, folder):
        (folder / "journal").mkdir(parents=True)
        (folder / "logs").mkdir()
        numbers = itertools.count(1)
        for i, records in enumerate(self.files, start=1):
            data = b"".join(record(kind, next(numbers), fields, frames) for kind, fields, frames in records)
            (folder / "journal" / f"{i:06d}.seg").write_bytes(data + (self.tail if i == len(self.files) else b""))
        replay, rollout = {"async_lag": LAG, "on_stale": self.on_stale}, {"groups_per_step": GROUPS_PER_STEP}
        (folder / "config.yaml").write_text(yaml.safe_dump({"replay": replay, "rollout": rollout}))
        for name, rows in (("ledger", self.ledger), ("logs/acks-rollout-0", self.acks), ("metrics", self.metrics)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder


def boots(journal, lag, where=0, **run):
    """Replay starts with these settings before the first record of a file."""
    journal.files[where].insert(1, ("boot", {"pid": 1, "run": {"async_lag": lag, **run}}, ()))


def groups_of(step):
    return [(0, 2 * step), (0, 2 * step + 1)]


def a_run(*, resumed=True):
    """Four steps of two groups each; resumed, the learner died after step 3 and came back with version 1."""
    journal = Journal()
    journal.learner(1, 0)
    for step in range(1, STEPS):
        for group in groups_of(step):
            journal.lease(group)
            journal.group(group, step - 1)
        journal.step(step, 1, groups_of(step))
    if resumed:
        journal.new_file()
        journal.learner(2, 1)
        for step in range(2, STEPS):
            journal.step(step, 2, groups_of(step), again=True)
    last = 2 if resumed else 1
    for group in groups_of(STEPS):
        journal.lease(group)
        journal.group(group, STEPS - 1)
    journal.step(STEPS, last, groups_of(STEPS))
    journal.lease((0, 99))
    journal.group((0, 99), STEPS)
    return journal
