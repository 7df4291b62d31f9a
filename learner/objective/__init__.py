"""The objective of a row: loss, correction, entropy bonus, KL term, distillation, with measurements."""

from collections.abc import Sequence

import torch

from configs.algorithm import Algorithm
from learner.corrections import Rho, build_correction
from learner.losses import LossInputs, build_loss
from learner.losses.base import log_ratio
from learner.objective.kl import estimate
from learner.objective.teaching import Teaching
from learner.rows import Row

Measurements = dict[str, torch.Tensor]
"""By name: sums over tokens in the loss, 0-dim; those whose name ends in `_max` are maxima."""


class Objective:
    """Weighs and adds up the tokens of a row; chosen once from the configuration."""

    def __init__(self, algorithm: Algorithm, teachers: Sequence[str] = ()) -> None:
        """`teachers` are names of the configuration's, in its order."""
        self.algorithm = algorithm
        self.loss, variant = build_loss(algorithm.loss)
        self.correct = build_correction(algorithm, variant.facts)
        self.teach = Teaching(algorithm, teachers)

    def __call__(
        self, row: Row, logprobs: torch.Tensor, entropy: torch.Tensor, *of_teacher: torch.Tensor
    ) -> tuple[torch.Tensor, Measurements]:
        """The row's share of the loss, 0-dim with a gradient, and what was measured.

        Args:
            row: m trajectories, n tokens in the loss.
            logprobs: [n] of the policy in training, with a gradient.
            entropy: [n] of its distribution at each token.
            of_teacher: what the output head gives besides for distillation (learner/policy/logprobs.py).
        """
        algorithm, now = self.algorithm, logprobs.detach()
        proximal = self._proximal(row, now)
        advantages, taught, of_teaching = self.teach(row, logprobs, of_teacher)
        output = self.loss(
            LossInputs(
                logprobs=logprobs,
                proximal_logprobs=proximal,
                advantages=advantages,
                lengths=row.lengths,
                groups=row.groups,
            )
        )
        sampled_by = now if algorithm.proximal == "behaviour" else proximal
        correction = self.correct(Rho(log_ratio(sampled_by, row.behaviour_logprobs), row.lengths))
        # selected, not multiplied: what is refused may be infinite
        value = torch.where(correction > 0, output.loss * correction, 0.0)
        total = (row.weights * value).sum()
        measured = {"loss": total.detach()} | self._measure(row, now, entropy.detach())
        if output.clipped is not None:
            measured["clipped"] = output.clipped.sum()
        if algorithm.correction is not None or algorithm.veto_low or algorithm.veto_high:
            measured |= {"correction": correction.sum(), "refused": (correction == 0).sum()}
        if algorithm.entropy_coef:
            total = total - algorithm.entropy_coef * (row.weights * entropy).sum()
        if algorithm.kl != "none" and algorithm.kl_in == "loss":
            assert row.reference_logprobs is not None, "learner/beside fills it in before the loss"
            kl = estimate(algorithm.kl, logprobs, row.reference_logprobs)
            measured["kl"] = kl.detach().sum()
            total = total + algorithm.kl_coef * (row.weights * kl).sum()
        if taught is not None:  # what a correction refuses teaches nothing; its weights are the loss's own
            total = total + (row.weights * torch.where(correction > 0, taught, 0.0)).sum()
        return total, measured | of_teaching

    def _proximal(self, row: Row, now: torch.Tensor) -> torch.Tensor:
        """[n] logprobs of the policy that ratios are taken against (docs/algorithms.md)."""
        match self.algorithm.proximal:
            case "behaviour":
                return row.behaviour_logprobs
            case "current":
                return now if row.proximal_logprobs is None else row.proximal_logprobs
            case _:
                share = row.lags / (row.lags + 1)
                return row.behaviour_logprobs + share * log_ratio(now, row.behaviour_logprobs)

    @torch.no_grad()
    def _measure(self, row: Row, now: torch.Tensor, entropy: torch.Tensor) -> Measurements:
        """The distance to the behaviour policy: k1 = -log w and k3 = w - 1 - log w estimate KL(behaviour || policy)
        from tokens of the former (Schulman 2020)."""
        delta = log_ratio(now, row.behaviour_logprobs)
        weight = delta.exp()
        moved = delta if row.proximal_logprobs is None else log_ratio(now, row.proximal_logprobs)
        logprob_diff = (now - row.behaviour_logprobs).abs()
        prob_diff = (now.exp() - row.behaviour_logprobs.exp()).abs()
        fresh = row.fresh.repeat_interleave(row.lengths, output_size=len(now))
        nothing = now.new_zeros(1)  # a row without a token in the loss has no maximum of its own
        return {
            "weight": weight.sum(),
            "weight_squared": weight.square().sum(),
            "k1": -delta.sum(),
            "k3": (weight - 1 - delta).sum(),
            "moved": (moved.exp() - 1 - moved).sum(),
            "entropy": entropy.sum(),
            "prob_diff": prob_diff.sum(),
            "prob_diff_max": torch.cat([nothing, prob_diff]).max(),
            "logprob_diff": logprob_diff.sum(),
            "logprob_diff_max": torch.cat([nothing, logprob_diff]).max(),
            "fresh_diff": torch.where(fresh, logprob_diff, 0.0).sum(),
            "fresh": fresh.sum(),
            "tokens": torch.full((), len(now), device=now.device),  # filled there: a copy would wait for the GPU
        }
