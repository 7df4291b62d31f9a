"""Partial rollouts: progress reports to replay, and prefixes from leases. No sockets."""

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np

from replay import messages as m
from rollout_server.engines.base import Partial

log = logging.getLogger(__name__)

LeaseKey = tuple[int, int, int]
MAX_TOKENS = 65536
"""Most tokens in one Renew (12 bytes each); what is left goes with the next one."""
FLAGS = {None: 0, "stop": 1, "length": 2}
"""How Renew.progress writes a finish reason."""


class ProgressSource(Protocol):
    """Provides the running answers of a lease."""

    def progress(self, request_id: str, since: Sequence[int]) -> Sequence[Partial]:
        """Tokens of each answer from number since[i] on; nothing for unknown requests."""


@dataclass(slots=True)
class _Told:
    """What replay has of one answer."""

    tokens: int = 0
    ended: bool = False


def lease_key(message: m.OfLease) -> LeaseKey:
    """The lease that a message is about."""
    return message.pass_, message.index, message.attempt


class ProgressReports:
    """Writes Renew messages: with `partial_rollouts` each carries what is new since the one before."""

    def __init__(self, group_size: int, *, partial_rollouts: bool, max_tokens: int = MAX_TOKENS) -> None:
        self._group_size = group_size
        self._max_tokens = max_tokens
        self._on = partial_rollouts
        self._told: dict[LeaseKey, list[_Told]] = {}

    def leased(self, lease: m.Lease) -> None:
        """A lease has come: replay knows the prefixes that it brings."""
        prefixes = prefixes_of(lease, self._group_size)
        if self._on and prefixes is not None:
            self._told[lease_key(lease)] = [_Told(p.token_ids.size, p.finish_reason is not None) for p in prefixes]

    def begin_again(self) -> None:
        """Report everything from the start: replay may have restarted."""
        self._told.clear()

    def renew(
        self,
        working: Iterable[tuple[LeaseKey, str]],
        running: Mapping[str, int],
        source: ProgressSource,
        *,
        queued: Container[str] = (),
        sampled: int = 0,
    ) -> m.Renew:
        """The next Renew, of leases with their requests' names; `running` counts tokens by name.

        `queued` and `sampled` are as in Renew, the former by name.
        """
        working = list(working)
        self._told = {key: self._told[key] for key, _ in working if key in self._told}
        entries: list[list[int]] = []
        new: list[tuple[Partial, int]] = []
        """Answers with new tokens, and how many of these there is room for."""
        room = self._max_tokens
        for position, (key, name) in enumerate(working if self._on else ()):
            answers = self._told.setdefault(key, [_Told() for _ in range(self._group_size)])
            parts = source.progress(name, [told.tokens for told in answers])
            for answer, part in enumerate(parts):
                told, count = answers[answer], min(part.token_ids.size, room)
                ended = part.finish_reason is not None and count == part.token_ids.size
                if count == 0 and (told.ended or not ended):
                    continue
                entries.append([position, answer, told.tokens, count, FLAGS[part.finish_reason] if ended else 0])
                new.append((part, count))
                room -= count
                told.tokens, told.ended = told.tokens + count, ended
        return m.Renew(
            leases=[[*key, running.get(name, 0)] for key, name in working],
            queued=[position for position, (_, name) in enumerate(working) if name in queued],
            sampled=sampled,
            progress=entries,
            token_ids=np.concatenate([np.empty(0, np.int32), *(part.token_ids[:count] for part, count in new)]),
            logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs[:count] for part, count in new)]),
            versions=np.concatenate([np.empty(0, np.int32), *(part.versions[:count] for part, count in new)]),
        )

    def rest(
        self, working: Iterable[tuple[LeaseKey, str]], running: Mapping[str, int], source: ProgressSource
    ) -> Iterator[m.Renew]:
        """As `renew`, of a server that leaves: all that replay lacks, also without `partial_rollouts`."""
        self._on, working = True, list(working)
        while True:
            renew = self.renew(working, running, source)
            yield renew
            if renew.token_ids.size < self._max_tokens:  # there was room for everything
                return

    def told(self) -> tuple[int, int]:
        """Answers of which replay has tokens, and how many tokens."""
        counts = [told.tokens for answers in self._told.values() for told in answers if told.tokens]
        return len(counts), sum(counts)


def prefixes_of(lease: m.Lease, n: int) -> list[Partial] | None:
    """The lease's prefix of each answer, empty for a fresh start; None without any.

    An answer with a token older than the lease allows starts anew as a whole, and so do all of them when the prefixes
    of the lease do not fit together.
    """
    if not lease.prefix_lengths.size:
        return None
    who = f"lease ({lease.pass_}, {lease.index}), attempt {lease.attempt}"
    problem = _problem(lease, n)
    if problem is not None:
        log.error("%s: its prefixes are not used: %s [corrupt]", who, problem)
        return None
    ends = np.cumsum(lease.prefix_lengths, dtype=np.int64).tolist()
    prefixes = []
    for start, stop, reason in zip([0, *ends[:-1]], ends, lease.prefix_finished, strict=True):
        prefix = Partial(
            token_ids=lease.prefix_token_ids[start:stop],
            logprobs=lease.prefix_logprobs[start:stop],
            versions=lease.prefix_versions[start:stop],
            finish_reason=cast(Literal["stop", "length"], reason) if reason else None,
        )
        oldest = int(prefix.versions.min(initial=lease.min_version))
        if oldest < lease.min_version:
            log.warning("%s: a prefix of version %d starts anew, %d is needed", who, oldest, lease.min_version)
            prefix = Partial()
        prefixes.append(prefix)
    return prefixes


def _problem(lease: m.Lease, n: int) -> str | None:
    lengths = lease.prefix_lengths
    if lengths.size != n or len(lease.prefix_finished) != n:
        return f"{lengths.size} lengths and {len(lease.prefix_finished)} finish reasons for {n} answers"
    if int(lengths.min()) < 0:
        return f"a length of {int(lengths.min())}"
    total = int(lengths.sum(dtype=np.int64))
    sizes = {
        "token_ids": lease.prefix_token_ids.size,
        "logprobs": lease.prefix_logprobs.size,
        "versions": lease.prefix_versions.size,
    }
    if set(sizes.values()) != {total}:
        return f"{sizes} entries for {total} tokens"
    unknown = set(lease.prefix_finished) - {"", "stop", "length"}
    return f"finish reason {min(unknown)!r}" if unknown else None
