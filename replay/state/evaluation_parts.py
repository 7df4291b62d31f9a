"""Parts of an evaluation: prompts of one set and mode that fit one result."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from configs.evaluation import MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN, PromptSet
from replay.data import Row, stream_seed
from replay.data.pictures import ROWS_BYTES, inline_bytes
from replay.messages import EvaluationLease

MAX_ANSWERS, MAX_PROMPTS = 1 << 16, 1 << 11
"""In one result and one lease, however short they are: a header has a bounded number of entries."""
SEEDS = 1 << 20
"""Streams of evaluations begin where those of prompts do not come."""


class EvaluationPart(NamedTuple):
    """Prompts of a set from number `first` on, answered greedily or sampled."""

    set: str = ""
    greedy: bool = True
    first: int = 0

    @classmethod
    def of(cls, plain: Sequence[Any]) -> "EvaluationPart":
        """From what msgpack made of one."""
        return cls(*plain)


@dataclass(frozen=True, slots=True)
class EvaluationWork:
    """What a part asks for."""

    of: PromptSet
    part: EvaluationPart
    prompts: list[Row]

    @property
    def samples(self) -> int:
        """Answers to each prompt."""
        return 1 if self.part.greedy else self.of.samples

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.samples

    @property
    def fingerprint(self) -> str:
        """Equal where prompts, samples and settings are: then an answer of an earlier start is one to this as well."""
        temperature = None if self.part.greedy else self.of.temperature
        asked = [self.prompts, self.samples, temperature, self.of.max_new_tokens]
        return hashlib.blake2b(msgpack.packb(asked), digest_size=8).hexdigest()

    def lease(self, version: int, run_seed: int) -> EvaluationLease:
        """The same for the same run seed, version and set, so that an evaluation can be repeated."""
        return EvaluationLease(
            version=version,
            set=self.of.name,
            greedy=self.part.greedy,
            first=self.part.first,
            samples=self.samples,
            temperature=self.of.temperature,
            max_new_tokens=self.of.max_new_tokens,
            seed=stream_seed(run_seed, version, SEEDS + _number(self.of.name)),
            prompts=self.prompts,
            asked=self.fingerprint,
        )


def parts_of(sets: Sequence[PromptSet], rows: Mapping[str, Sequence[Row]]) -> dict[EvaluationPart, EvaluationWork]:
    """The parts of every evaluation, set by set, greedy ones first; `rows` are the prompts of each set by name."""
    found: dict[EvaluationPart, EvaluationWork] = {}
    for one in sets:
        prompts = list(rows.get(one.name, ())[: one.num_prompts])
        for greedy, samples in ((True, int(one.greedy)), (False, one.samples)):
            if samples:
                at_once = min(prompts_at_once(samples, one.max_new_tokens), _rows_at_once(prompts))
                for first in range(0, len(prompts), at_once):
                    part = EvaluationPart(one.name, greedy, first)
                    found[part] = EvaluationWork(one, part, prompts[first : first + at_once])
    return found


def prompts_at_once(samples: int, max_new_tokens: int) -> int:
    """Prompts of one part: they, and their answers, fit into one message. The configuration has seen that one's do."""
    answers = min(MAX_ANSWERS, MAX_TEXT_BYTES // (max_new_tokens * TEXT_BYTES_PER_TOKEN))
    return max(1, min(MAX_PROMPTS, answers // samples))


def _rows_at_once(rows: Sequence[Row]) -> int:
    """Rows whose pictures fit into one lease."""
    heaviest = max((inline_bytes(row) for row in rows), default=0)
    return max(1, ROWS_BYTES // heaviest) if heaviest else MAX_PROMPTS


def _number(name: str) -> int:
    """Of a set, wherever it stands among the others; 0 without a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") if name else 0
