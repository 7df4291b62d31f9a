"""Independent books: what the peers have seen, held against what the protocol promises.

Policies are known by their digests. Simulated engines write the number of the policy that samples a token into the
token itself, so that every trained token tells which weights it is of, whatever version it claims.
"""

import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from replay import messages as m
from replay.data import PromptSource
from replay.journal import Record
from replay.state.leases import GroupId


class Violation(AssertionError):
    """A promise was broken."""


def expect(true: bool, what: str) -> None:
    if not true:
        raise Violation(what)


@dataclass(slots=True)
class Step:
    digest: str
    groups: list[GroupId]


@dataclass(slots=True)
class Books:
    async_lag: int
    on_stale: str
    num_ranks: int
    trajectories: int
    policies: dict[str, int] = field(default_factory=dict)
    """Number of each policy, by digest."""
    line: dict[int, Step] = field(default_factory=dict)
    """Committed steps of the surviving line; those after the present version are to be repeated."""
    initial: str = ""
    parts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksum of each rank's part of a batch, by (step, rank)."""
    accepted: set[tuple[GroupId, int]] = field(default_factory=set)
    """(group, attempt) that replay has acknowledged as accepted."""
    leased: set[GroupId] = field(default_factory=set)
    dropped: Counter[GroupId] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    version: int = 0
    made: dict[int, Step] = field(default_factory=dict)
    """What the present learner says to have made, until replay has it."""
    journaled: set[tuple[GroupId, int]] = field(default_factory=set)
    """(group, attempt) that the journal has on its disk."""
    bounds: dict[GroupId, int] = field(default_factory=dict)
    """Of the lag, when a group was admitted; `async_lag` is the present one."""

    def policy(self, digest: str) -> int:
        """The number that tokens of this policy carry."""
        return self.policies.setdefault(digest, len(self.policies) + 1)

    def settle(self, record: Record) -> None:
        """Only what replay has on its disk stands; what a dying learner made without replay's knowledge does not."""
        fields = record.fields
        if record.kind == "learner":
            self._starts(fields["version"], fields["digest"])
        elif record.kind == "commit":
            made = self.made.get(fields["step"])
            expect(made is not None and made.digest == fields["digest"], f"{fields}: nobody made that")
            assert made is not None
            self._committed(fields["step"], made)
        elif record.kind == "group":
            self.journaled.add((as_group(fields["group"]), fields["attempt"]))
        elif record.kind == "drop":
            self.dropped[as_group(fields["group"])] += 1
        elif record.kind == "lag":
            expect(fields["async_lag"] < self.async_lag, f"{fields} does not lower the lag, which is {self.async_lag}")
            self.async_lag = fields["async_lag"]
            self.counts["lag_lowered"] += 1
        elif record.kind == "lease":
            self.bounds.setdefault(as_group(fields["group"]), self.async_lag)
        elif record.kind == "stale":
            self.bounds[as_group(fields["group"])] = self.async_lag
        elif record.kind == "diverged" and fields["expected"] == fields["found"]:
            self._rolls_back(fields["step"], [as_group(group) for group in fields["dropped"]])

    def _starts(self, version: int, digest: str) -> None:
        self.version = version
        self.made.clear()
        if version == 0 and not self.initial:
            self.initial = digest
        elif self.digest(version) != digest:
            self._ends_at(version, digest)

    def _committed(self, step: int, made: Step) -> None:
        known = self.line.get(step)
        self.version = step
        if known is None:
            self.line[step] = made
            self.counts["steps"] += 1
            return
        self.counts["repeated"] += 1
        if known.digest != made.digest:
            self._ends_at(step, made.digest)

    def _rolls_back(self, version: int, dropped: list[GroupId]) -> None:
        """The line ends at `version`, whose weights are what they were; all that was trained since is dropped."""
        self.counts["rolled_back"] += 1
        trained = [group for step, made in self.line.items() if step > version for group in made.groups]
        expect(sorted(trained) == sorted(dropped), f"{dropped} dropped by a roll-back, {trained} were trained")
        self.dropped.update(dropped)
        self._cut(version)

    def digest(self, version: int) -> str:
        """Digest of a version of the line."""
        return self.initial if version == 0 else self.line[version].digest

    def part(self, batch: m.Batch) -> None:
        """A rank got its part of a batch: the same one for the same step of the same line."""
        content = checksum(batch)
        known = self.parts.setdefault((batch.step, batch.rank), content)
        expect(known == content, f"rank {batch.rank} got another part of batch {batch.step} than before")

    def batch(self, parts: list[m.Batch]) -> None:
        first = parts[0]
        expect(len({part.num_microbatches for part in parts}) == 1, "ranks have different numbers of microbatches")
        positions = sorted(position for part in parts for position in part.trajectory.tolist())
        expect(positions == list(range(self.trajectories)), "a trajectory is not at exactly one rank")
        expect(first.step == self.version + 1, f"batch {first.step} is trained at version {self.version}")
        groups = [as_group(group) for group in first.group_ids]
        for step, made in self.line.items():
            again = set(groups) & set(made.groups)
            expect(step == first.step or not again, f"{again} trained in steps {step} and {first.step}")
        expect(len(set(groups)) == len(groups), f"batch {first.step} has a group twice")
        if first.expected_digest:
            known = self.line.get(first.step)
            expect(known is not None and known.digest == first.expected_digest, "expects a digest that nobody made")
        bound = max(self.bounds[group] for group in groups)
        for part in parts:
            self._tokens(part, bound)

    def commits(self, step: int, digest: str, groups: list[list[int]]) -> None:
        known = self.line.get(step)
        made = self.made[step] = Step(digest, [as_group(group) for group in groups])
        expect(known is None or known.groups == made.groups, f"step {step} repeated with other groups")

    def evaluated(self, result: m.EvaluationResult) -> None:
        """The learner got an evaluation: of the policy that it calls by this version."""
        self.counts["evaluations"] += 1
        if result.version <= self.version:
            policy = self.policy(self.digest(result.version))
            expect(int(result.rewards[0]) == policy, f"an evaluation of version {result.version} is of another policy")

    def _tokens(self, part: m.Batch, bound: int) -> None:
        start, answers = 0, [np.empty(0, np.int32)]
        for prompt, answer in zip(part.prompt_lengths.tolist(), part.lengths.tolist(), strict=True):
            answers.append(part.token_ids[start + prompt : start + prompt + answer])
            start += prompt + answer
        tokens = np.concatenate(answers)
        lag = part.step - 1 - part.versions[part.loss_mask != 0]
        oldest = int(lag.max(initial=0))
        expect(oldest <= bound, f"step {part.step} trains a token of lag {oldest}, {bound} is allowed")
        expect(not part.versions.size or int(part.versions.max()) < part.step, "a token of a version not made yet")
        for version in np.unique(part.versions).tolist():
            found = set(np.unique(tokens[part.versions == version]).tolist())
            wanted = self.policy(self.digest(version))
            expect(found == {wanted}, f"step {part.step}: tokens of version {version} are of policies {found},"
                                      f" the line has {wanted}")  # fmt: skip

    def _ends_at(self, step: int, digest: str) -> None:
        """The weights of `step` are others than before: what was made of the old ones is off the line."""
        self.counts["diverged"] += 1
        if step == 0:
            self.initial = digest
        else:
            self.line[step].digest = digest
        self._cut(step)

    def _cut(self, step: int) -> None:
        for later in [s for s in self.line if s > step]:
            del self.line[later]
        for later, rank in [key for key in self.parts if key[0] > step]:
            del self.parts[later, rank]

    def lease(self, lease: m.Lease) -> None:
        self.leased.add((lease.pass_, lease.index))
        self.counts["leases"] += 1

    def ack(self, ack: m.Ack) -> None:
        self.counts[f"acks/{ack.status}"] += 1
        # an honest server cannot know of one thing: a version that died with its learner before replay heard of it
        told = ack.status != "rejected" or "published are" in ack.reason
        expect(told, f"group {(ack.pass_, ack.index)} of an honest server rejected: {ack.reason}")
        if ack.status == "accepted":
            group = (ack.pass_, ack.index), ack.attempt
            expect(group in self.journaled, f"{group} was acknowledged and is not in the journal")
            self.accepted.add(group)

    def order(self, source: PromptSource, held: set[GroupId]) -> None:
        """Every prompt, in the order of the passes, was trained once or dropped once, or replay has it.

        Args:
            source: the prompts from the first one on.
            held: admitted groups that are in no committed step.
        """
        dropped = set(self.dropped)
        expect(not dropped or max(self.dropped.values()) == 1, "a group was dropped twice")
        trained = [group for _, made in sorted(self.line.items()) for group in made.groups]
        expect(not dropped & set(trained), f"{dropped & set(trained)} trained and dropped")
        seen = set(trained) | dropped | held
        expect(not self.leased - seen, f"{self.leased - seen} were leased, and nobody has them")
        prompts: list[GroupId] = []
        while len(prompts) < len(seen):
            pass_, index, _ = source.next()
            prompts.append((pass_, index))
        expect(set(prompts) == seen, f"prompts {set(prompts) - seen} were passed over")
        if self.on_stale in ("wait", "substitute"):
            oldest = [group for group in prompts if group not in dropped]
            expect(trained == oldest[: len(trained)], "batches are not of the oldest admitted groups, in order")


def as_group(plain: list[int]) -> GroupId:
    return plain[0], plain[1]


def checksum(batch: m.Batch) -> int:
    """Of everything that the weights are made of."""
    arrays = (batch.trajectory, batch.microbatch, batch.token_ids, batch.loss_mask, batch.logprobs, batch.versions)
    value = zlib.crc32(repr((batch.group_ids, batch.num_microbatches, batch.total_loss_tokens)).encode())
    for array in (*arrays, batch.all_rewards, batch.all_groups, batch.lengths):
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value
