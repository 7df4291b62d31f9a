"""What teachers make of a row: terms of advantages and loss, and measurements."""

from collections.abc import Mapping, Sequence

import torch

from configs.algorithm import Algorithm
from learner.distillation import DistillationInputs, build_distillation
from learner.rows import Row

KL, KEPT, AGREES, COEF = "taught_kl", "taught_tokens", "taught_agrees", "taught_coef_max"
"""Names of measurements: sums over tokens, as those of the objective; the first two of each of several teachers too."""


class Teaching:
    """The distillation of a run, with its schedule and masks; one without any leaves rows as they are."""

    def __init__(self, algorithm: Algorithm, teachers: Sequence[str]) -> None:
        self.distillation, self.teachers = build_distillation(algorithm), tuple(teachers)

    def __call__(
        self, row: Row, logprobs: torch.Tensor, of_teacher: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Of a row, as Objective has it: advantages [n], what the loss adds [n] or None, and measurements."""
        chosen = self.distillation
        if chosen is None:
            return row.advantages, None, {}
        top, divergence, confidence, best = None, None, None, None
        if row.teacher_view is not None:
            divergence, confidence, best = of_teacher
        elif row.teacher_ids is not None and row.teacher_top is not None:
            (top,), confidence, best = of_teacher, row.teacher_top[:, 0].exp(), row.teacher_ids[:, 0]
        inputs = DistillationInputs(
            logprobs=logprobs,
            behaviour_logprobs=row.behaviour_logprobs,
            teacher_logprobs=row.teacher_logprobs,
            top_logprobs=top,
            teacher_top=row.teacher_top,
            divergence=divergence,
            confidence=confidence,
        )
        found = chosen(inputs)
        kept = torch.ones_like(row.targets, dtype=torch.bool) if found.kept is None else found.kept
        if chosen.first_tokens:
            kept = kept & (_places(row.lengths, len(kept)) < chosen.first_tokens)
        coef = chosen.coefficient(row.step)
        # selected, not multiplied: what is left out may be infinite
        kl = torch.where(kept, found.kl, 0.0)
        measured = self._measure(row, kl.detach(), kept, best) | {COEF: kl.new_tensor(coef)}
        advantages, term = chosen.task * row.advantages, coef * kl
        if chosen.facts.in_advantages:
            return advantages - term.detach(), None, measured
        return advantages, term, measured

    def _measure(
        self, row: Row, kl: torch.Tensor, kept: torch.Tensor, best: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Sums, of the same names on all ranks and rows."""
        found = {KL: kl.sum(), KEPT: kept.sum()}
        if best is not None:
            found[AGREES] = (best == row.targets).sum()
        if row.teacher is not None and len(self.teachers) > 1:
            of_token = row.teacher.repeat_interleave(row.lengths, output_size=len(kl))
            for number, name in enumerate(self.teachers):
                own = kept & (of_token == number)
                found |= {f"{KEPT}/{name}": own.sum(), f"{KL}/{name}": torch.where(own, kl, 0.0).sum()}
        return found


def _places(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n] number of each token in its answer, from 0."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=tokens)
    return torch.arange(tokens, device=lengths.device) - starts


def metrics_of(values: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Numbers for metrics.jsonl.

    `distill/kl` is the mean divergence over the tokens that are taught, as the chosen distillation measures it (of
    `sampled_advantage` log behaviour - log teacher), and `distill/kl/NAME` that of one of several teachers. Of all
    tokens in the loss, `distill/agreement` is the share that is the teacher's likeliest, and `distill/masked` the share
    that is not taught. `distill/coef` is the factor of the step.
    """
    if KEPT not in values:
        return {}
    found = {"distill/masked": 1 - values[KEPT] / tokens, "distill/coef": values[COEF]}
    if AGREES in values:
        found["distill/agreement"] = values[AGREES] / tokens
    if values[KEPT]:
        found["distill/kl"] = values[KL] / values[KEPT]
    for name in (name.removeprefix(f"{KEPT}/") for name in values if name.startswith(f"{KEPT}/")):
        if count := values[f"{KEPT}/{name}"]:
            found[f"distill/kl/{name}"] = values[f"{KL}/{name}"] / count
    return found
