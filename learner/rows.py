"""From a rank's part of a batch to unpadded rows, one a microbatch.

Pure. The number of microbatches and who is in which was fixed by replay for all ranks at once. Trajectories lie one
after the other, with positions 0, 1, 2, ... in each, as in the engine that sampled; attention is given where each
starts (learner/policy/attention.py). Where it pays, answers share their prompt (learner/prefixes.py): then
tokens lie elsewhere, but what is measured and trained has one element for each token in the loss and no other, in the
order of the trajectories, either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.errors import SlipstreamError
from configs.teachers import Scoring
from learner.pictures import RowPictures, Shown
from learner.prefixes import Layout, Prefixes, lay_side_by_side
from learner.prefixes import offsets as offsets
from learner.teacher_view import TeacherView
from replay.batches.sharing import Wanted
from replay.messages import Batch
from replay.routing import problem_with_batch
from replay.scores import problem_with_scores
from slipstream.families.experts import Experts

PAD_ID = 0
"""Any id of the vocabulary."""
MIN_TOKENS = 2
"""Of a row without a trajectory."""


class BatchError(SlipstreamError, ValueError, code="SLIP-LEARN-01"):
    """The batch contradicts itself or the lag bound; it must not be trained on."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one update of a step is made from."""

    trajectories: slice
    """Positions in the batch."""
    microbatches: slice
    """Of every rank."""


def minibatches_of(batch: Batch) -> list[Minibatch]:
    """Those of a batch, in order; one of everything where replay names none."""
    parts = np.array(batch.minibatches or [[len(batch.group_ids), batch.num_microbatches]])
    groups, microbatches = offsets(parts[:, 0]), offsets(parts[:, 1])
    places = np.searchsorted(batch.all_groups, groups).tolist()
    return [Minibatch(slice(*places[i : i + 2]), slice(*microbatches[i : i + 2].tolist())) for i in range(len(parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One microbatch: m samples, called trajectories below since mostly each is one; n tokens in the loss.

    Example: prompt [7, 8] with answer [9, 2] and prompt [6] with answer [5], all answers in the loss, have
    input_ids [[7, 8, 9, 2, 6, 5]], position_ids [[0, 1, 2, 3, 0, 1]], starts [0, 4, 6], kept [1, 2, 4],
    targets [9, 2, 5] and lengths [2, 1].
    """

    input_ids: torch.Tensor
    """[1, total] int64, prompt then answer of each trajectory."""
    position_ids: torch.Tensor
    """[1, total] int64."""
    starts: torch.Tensor
    """[m+1] int32, first position of each trajectory, then the total; with `prefixes`, of each trajectory that shares
    nothing and each shared prompt."""
    longest: int
    """Tokens of the longest of these."""
    kept: torch.Tensor
    """[n] int64, positions whose next token is in the loss; that of a shared prompt's last token several times."""
    targets: torch.Tensor
    """[n] int64, those next tokens; all tensors below speak of them."""
    behaviour_logprobs: torch.Tensor
    """[n] float32, of the policy that sampled the token."""
    advantages: torch.Tensor
    """[n] float32, of the token's trajectory, or with a critic of the token."""
    weights: torch.Tensor
    """[n] float32, share of the token in the loss of the batch (learner/objective/aggregation.py)."""
    lags: torch.Tensor
    """[n] float32, version being trained minus version that sampled the token."""
    lengths: torch.Tensor
    """[m] int64, tokens in the loss of each trajectory, at least one; none in a row without any trajectory."""
    groups: torch.Tensor
    """[m] int64, group of each trajectory."""
    fresh: torch.Tensor
    """[m] bool, whether the version being trained sampled the whole answer, tokens that are not in the loss as well:
    behind a token of older weights keys and values are theirs, too."""
    number: int = 0
    """Of its microbatch."""
    is_taught: bool = False
    """Whether its trajectories are rows of learner.sft, which are in the loss by their likelihood."""
    step: int = 0
    """Of its batch."""
    trajectories: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[m] int64, position in the batch of the trajectory that each sample is of."""
    proximal_logprobs: torch.Tensor | None = None
    """[n] float32 of the policy at the start of the step, where ratios are taken against it."""
    reference_logprobs: torch.Tensor | None = None
    """[n] float32 of the reference model, where the run has a KL term."""
    reference_sums: torch.Tensor | None = None
    """[m] float32 sums of the reference model's logprobs over each trajectory, where the run learns from pairs."""
    values: torch.Tensor | None = None
    """[n] float32 of the critic at the start of the step, before the token."""
    returns: torch.Tensor | None = None
    """[n] float32, what the critic learns."""
    prefixes: Prefixes | None = None
    """Answers that share their prompts; None without any."""
    saved: int = 0
    """Tokens of the trajectories that the row leaves out, because they share their prompts."""
    routing: torch.Tensor | None = None
    """[total, layers, k] experts of each token in each decoder layer, uint8 or uint16; None where the model routes. The
    last token of a trajectory, which no engine has read, has those of the one before it."""
    teacher_logprobs: torch.Tensor | None = None
    """[n] float32, the teacher's of the token; None where rollout servers ask no teacher, as all four."""
    teacher_ids: torch.Tensor | None = None
    """[n, k] int64, the teacher's own likeliest tokens, the likeliest first; None where k is 0."""
    teacher_top: torch.Tensor | None = None
    """[n, k] float32, its logprobs of those."""
    teacher: torch.Tensor | None = None
    """[m] int64, number in `teachers` of the configuration of each trajectory's teacher."""
    teacher_view: TeacherView | None = None
    """Of a teacher in the learner's ranks, once the row is on the device (learner/beside/teacher.py)."""
    pictures: RowPictures | None = None
    """Of its prompts; position_ids are [3, 1, total] then, of time, row and column."""

    def by_own_router(self) -> "Row":
        """For another model than the one that sampled, which chooses experts itself."""
        return self if self.routing is None else replace(self, routing=None)

    def to(self, device: torch.device) -> "Row":
        """The same row on a device."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {n: t.to(device, non_blocking=True) for n, t in named.items() if torch.is_tensor(t)}
        pictures = self.pictures and self.pictures.to(device)
        return replace(self, prefixes=self.prefixes and self.prefixes.to(device), pictures=pictures, **moved)


def sampled_part(batch: Batch) -> Batch:
    """The batch as if it had no rows of learner.sft, as far as every rank knows all of it."""
    if not batch.taught[0]:
        return batch
    groups = len(batch.group_ids) - batch.taught[0]
    own = slice(len(batch.all_rewards) - batch.taught[0])
    of_all = {name: getattr(batch, name)[own] for name in ("all_rewards", "all_groups", "all_loss_tokens")}
    return replace(batch, group_ids=batch.group_ids[:groups], **of_all)


def lay_out(
    batch: Batch,
    advantages: NDArray[np.float32],
    weights: NDArray[np.float32],
    share_prefixes: Wanted = False,
    shown: Shown | None = None,
    routing: Sequence[NDArray[Any]] = (),
    scoring: Scoring | None = None,
) -> list[Row]:
    """Exactly `batch.num_microbatches` rows of this rank, in order and in host memory.

    A row without a trajectory has two tokens and none in the loss, so that this rank takes part in every collective of
    the others (invariant 9).

    Args:
        batch: this rank's part, which `check` has let pass.
        advantages: [N] float32, of the whole batch.
        weights: [N] float32, of each token of a trajectory; trajectories of weight 0 are left out.
        share_prefixes: as in the configuration.
        shown: pictures of the batch, where it has any.
        routing: [P + L, layers, k] of each sample, where it is replayed.
        scoring: what rollout servers have asked teachers for.
    """
    tokens = np.split(batch.token_ids, offsets(batch.prompt_lengths + batch.lengths)[1:-1])
    lags, is_fresh, answers = lags_of(batch), batch.versions == batch.step - 1, offsets(batch.lengths)

    def row(number: int, members: list[int]) -> Row:
        pieces, prompts = [tokens[i] for i in members], [int(batch.prompt_lengths[i]) for i in members]
        laid, positions, pictures = _laid(batch, members, pieces, prompts, share_prefixes, shown)
        chosen = [np.flatnonzero(batch.loss_mask[answers[i] : answers[i + 1]]) for i in members]
        # an answer's first token is predicted from the prompt's last
        places = zip(chosen, laid.answers, laid.before, strict=False)
        kept = [np.where(at > 0, first + at - 1, before) for at, first, before in places]
        ends = zip(pieces, prompts, chosen, strict=False)
        targets = [piece[prompt + at].astype(np.int64) for piece, prompt, at in ends]
        of_token = joined([answers[i] + at for i, at in zip(members, chosen, strict=True)])
        counts = np.array([len(at) for at in chosen], np.int64)
        whole = batch.trajectory[members]
        return Row(
            position_ids=positions,
            pictures=pictures,
            **_placed(laid),
            kept=torch.from_numpy(joined(kept)),
            targets=torch.from_numpy(joined(targets)),
            behaviour_logprobs=torch.from_numpy(batch.logprobs[of_token].astype(np.float32)),
            advantages=torch.from_numpy(np.repeat(advantages[whole], counts)),
            weights=torch.from_numpy(np.repeat(weights[whole], counts)),
            lags=torch.from_numpy(lags[of_token].astype(np.float32)),
            lengths=torch.from_numpy(counts),
            groups=torch.from_numpy(batch.all_groups[whole].astype(np.int64)),
            fresh=torch.tensor([is_fresh[answers[i] : answers[i + 1]].all() for i in members], dtype=torch.bool),
            number=number,
            step=batch.step,
            routing=_routed(laid, [routing[i] for i in members] if routing else []),
            trajectories=torch.from_numpy(whole.astype(np.int64)),
            **_taught(batch, members, of_token, scoring),
        )

    contents = _contents(batch, (weights > 0) & (batch.all_loss_tokens > 0))
    return [row(number, members) for number, members in enumerate(contents)]


def _contents(batch: Batch, trained: NDArray[np.bool_]) -> list[list[int]]:
    """Samples of each microbatch, of `trained` trajectories alone."""
    contents: list[list[int]] = [[] for _ in range(batch.num_microbatches)]
    of_sample = trained[batch.trajectory] & (_loss_tokens(batch) > 0)
    for mine in np.flatnonzero(of_sample):
        contents[batch.microbatch[mine]].append(int(mine))
    return contents


def _laid(
    batch: Batch,
    members: list[int],
    pieces: list[NDArray[np.int32]],
    prompts: list[int],
    share_prefixes: Wanted,
    shown: Shown | None,
) -> tuple[Layout, torch.Tensor, RowPictures | None]:
    """Where the tokens of these samples stand, their positions [1, total], and pictures; with those [3, 1, total]."""
    if not members:
        pieces, prompts = [np.full(MIN_TOKENS, PAD_ID, np.int32)], [1]
    if shown is None or not members:
        laid = lay_side_by_side(pieces, prompts, share_prefixes)
        return laid, torch.from_numpy(laid.positions)[None], None
    laid = lay_side_by_side(pieces, prompts, share_prefixes, shown.names(members))
    return laid, *shown.laid(batch, members, laid)


def _placed(laid: Layout) -> dict[str, Any]:
    """Fields of a row: what stands where."""
    return {
        "input_ids": torch.from_numpy(laid.ids)[None],
        "starts": torch.from_numpy(laid.starts.astype(np.int32)),
        "longest": laid.longest,
        "prefixes": laid.prefixes,
        "saved": laid.saved,
    }


def _routed(laid: Layout, routing: list[NDArray[Any]]) -> torch.Tensor | None:
    """[total, layers, k] of a row; a shared prompt's tokens have it of the first trajectory that shares it."""
    if not routing:
        return None
    first = offsets([len(rows) for rows in routing])
    return torch.from_numpy(np.concatenate(routing)[first[laid.owners] + laid.positions])


def _taught(batch: Batch, members: list[int], of_token: NDArray[np.int64], scoring: Scoring | None) -> dict[str, Any]:
    """Fields of a row: what teachers say of these tokens."""
    if scoring is None:
        return {}
    names = [batch.teachers[i].rpartition("@")[0] for i in members]
    found: dict[str, NDArray[Any]] = {
        "teacher_logprobs": batch.teacher_logprobs[of_token].astype(np.float32),
        "teacher": np.array([scoring.names.index(name) for name in names], np.int64),
    }
    if scoring.k:
        found["teacher_ids"] = batch.teacher_ids.reshape(-1, scoring.k)[of_token].astype(np.int64)
        found["teacher_top"] = batch.teacher_top.reshape(-1, scoring.k)[of_token].astype(np.float32)
    return {name: torch.from_numpy(values) for name, values in found.items()}


def _loss_tokens(batch: Batch) -> NDArray[np.int64]:
    """[n] tokens in the loss of each sample."""
    in_loss = offsets(batch.loss_mask != 0)
    return np.diff(in_loss[offsets(batch.lengths)])


def joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """All parts one after the other; empty without any."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def lags_of(batch: Batch) -> NDArray[np.int32]:
    """[answer tokens] version being trained minus version that sampled; 0 outside the loss."""
    return np.where(batch.loss_mask != 0, batch.step - 1 - batch.versions, 0)


def check(
    batch: Batch,
    *,
    async_lag: int,
    vocab_size: int,
    experts: Experts | None = None,
    scoring: Scoring | None = None,
) -> None:
    """Refuse a batch that contradicts itself, the lag bound (invariant 1) or the model.

    With `experts` their routing is replayed, and must be that of its tokens; with `scoring` so must teachers' scores.

    Groups keep the bound that they were admitted under, where a resumed run has a lower `async_lag`.

    Raises:
        BatchError: arrays disagree in length, an index or a token id is out of range, a trajectory has no prompt, a
            token in the loss is over-age or from the future, or its behaviour logprob or a reward is not finite.
    """
    where = f"batch {batch.step}, rank {batch.rank}"
    _check_shapes(batch, where, vocab_size)
    in_loss, lags = batch.loss_mask != 0, lags_of(batch)
    if (i := _first((batch.prompt_lengths < 1) | (batch.lengths < 0))) is not None:
        raise BatchError(
            f"{where}: trajectory {batch.trajectory[i]} has a prompt of {batch.prompt_lengths[i]} tokens"
            f" and an answer of {batch.lengths[i]}"
        )
    bound = max(async_lag, batch.async_lag)
    if (i := _first((lags < 0) | (lags > bound))) is not None:
        raise BatchError(
            f"{where}: a token sampled by version {batch.versions[i]} has lag {lags[i]}, allowed are 0 to {bound}"
        )
    if (i := _first(~np.isfinite(batch.all_rewards))) is not None:
        raise BatchError(f"{where}: reward of trajectory {i} is {batch.all_rewards[i]}")
    if (i := _first(in_loss & ~np.isfinite(batch.logprobs))) is not None:
        raise BatchError(f"{where}: answer token {i} has behaviour logprob {batch.logprobs[i]}")
    _check_counts(batch, where)
    _check_minibatches(batch, where)
    problem = problem_with_batch(batch, experts) or problem_with_scores(batch, batch.lengths.size, scoring, vocab_size)
    if problem is not None:
        raise BatchError(f"{where}: {problem}")


def _check_counts(batch: Batch, where: str) -> None:
    """Samples and tokens in the loss are as stated; of a trajectory with samples on other ranks too, at most so."""
    size = len(batch.all_rewards)
    samples = batch.all_samples if batch.all_samples.size else np.ones(size, np.int32)
    here = np.bincount(batch.trajectory, minlength=size)
    if (i := _first(here > samples)) is not None:
        raise BatchError(f"{where}: {here[i]} samples of trajectory {i}, all_samples says {samples[i]}")
    counts = np.bincount(batch.trajectory, weights=_loss_tokens(batch), minlength=size).astype(np.int64)
    stated = batch.all_loss_tokens
    if (i := _first((counts > stated) | ((here == samples) & (counts != stated)))) is not None:
        raise BatchError(
            f"{where}: trajectory {i} has {counts[i]} tokens in the loss, all_loss_tokens says {stated[i]}"
        )


def _check_minibatches(batch: Batch, where: str) -> None:
    """Mini-batches divide the groups, and what is in a microbatch belongs to its mini-batch."""
    parts, whole = batch.minibatches, [len(batch.group_ids), batch.num_microbatches]
    if parts and ([sum(counts) for counts in zip(*parts, strict=True)] != whole or min(map(min, parts)) < 1):
        raise BatchError(f"{where}: mini-batches {parts} of groups and microbatches do not divide {whole}")
    if (i := _first(np.diff(batch.all_groups) < 0)) is not None:
        raise BatchError(f"{where}: trajectory {i + 1} is of an earlier group than the one before")
    for part in minibatches_of(batch):
        inside = (batch.trajectory >= part.trajectories.start) & (batch.trajectory < part.trajectories.stop)
        here = (batch.microbatch >= part.microbatches.start) & (batch.microbatch < part.microbatches.stop)
        if (i := _first(inside != here)) is not None:
            raise BatchError(f"{where}: trajectory {batch.trajectory[i]} is in a microbatch of another mini-batch")


def _check_shapes(batch: Batch, where: str, vocab_size: int) -> None:
    n, total, answers = len(batch.trajectory), int(batch.prompt_lengths.sum()), int(batch.lengths.sum())
    lengths = {"microbatch": n, "prompt_lengths": n, "lengths": n, "token_ids": total + answers}
    lengths |= dict.fromkeys(("loss_mask", "logprobs", "versions"), answers)
    lengths |= dict.fromkeys(("all_groups", "all_loss_tokens"), len(batch.all_rewards))
    lengths["all_samples"] = len(batch.all_rewards) if batch.all_samples.size else 0
    if batch.picture_counts.size:
        lengths |= {"picture_counts": len(batch.group_ids), "pictures": int(batch.picture_counts.sum())}
    for name, length in lengths.items():
        if len(getattr(batch, name)) != length:
            raise BatchError(f"{where}: {name} has {len(getattr(batch, name))} entries, not {length}")
    limits = {"trajectory": len(batch.all_rewards), "microbatch": batch.num_microbatches, "token_ids": vocab_size}
    for name, limit in limits.items():
        values = getattr(batch, name)
        if (i := _first((values < 0) | (values >= limit))) is not None:
            raise BatchError(f"{where}: {name}[{i}] is {values[i]}, not below {limit}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """Index of the first wrong element; None without any."""
    places = np.flatnonzero(wrong)
    return int(places[0]) if places.size else None
