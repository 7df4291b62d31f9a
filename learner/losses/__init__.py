"""Losses, one a file, chosen once by algorithm.loss."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.algorithm import Algorithm, LossTraits
from configs.errors import SlipstreamError
from learner.losses.base import Loss, LossFactory, LossInputs, LossOutput, declare, traits_of
from learner.losses.cispo import cispo
from learner.losses.dppo_tv import dppo_tv
from learner.losses.gspo import gspo
from learner.losses.policy_gradient import policy_gradient
from learner.losses.ppo_clip import ppo_clip
from learner.losses.sapo import sapo

LOSSES: dict[str, LossFactory] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "policy_gradient": policy_gradient,
}

__all__ = ["LOSSES", "Loss", "LossError", "LossFactory", "LossInputs", "LossOutput", "build_loss", "declare"]


class LossError(SlipstreamError, ValueError, code="SLIP-LEARN-02"):
    """algorithm.loss cannot be used; the message says what it names."""


@dataclass(frozen=True, slots=True)
class BuiltLoss:
    """A loss with what it declares of itself."""

    loss: Loss
    traits: LossTraits
    place: str = ""
    """`path/to/file.py:name`, whose output is checked; empty for a built-in loss."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[n] values. Raises LossError: a loss from a file gave something else."""
        output = self.loss(inputs)
        if self.place and (problem := _problem_with(output, inputs.logprobs)):
            raise LossError(
                f"algorithm.loss: {self.place!r} {problem}; return LossOutput(loss=...) with a value for each token"
                " as it comes from logprobs, neither summed nor averaged: that is done over the whole batch"
            )
        return output


def build_loss(algorithm: Algorithm) -> BuiltLoss:
    """The loss of this configuration.

    Raises:
        LossError: algorithm.loss names a file or a function in it that is not there, or that is no factory of a loss.
    """
    if algorithm.built_in is not None:
        return BuiltLoss(LOSSES[algorithm.loss](algorithm), algorithm.built_in)
    factory = _from_file(algorithm.loss)
    loss = factory(algorithm)
    if not callable(loss):
        raise LossError(f"algorithm.loss: {algorithm.loss!r} gave {type(loss).__name__} instead of a loss")
    return BuiltLoss(loss, traits_of(factory), algorithm.loss)


def _problem_with(output: object, logprobs: torch.Tensor) -> str:
    """Why it is no loss of these [n] logprobs; empty where it is. A mean over a row would spread unnoticed."""
    if not isinstance(output, LossOutput) or not torch.is_tensor(output.loss):
        return f"returned {type(output).__name__} instead of a LossOutput with a tensor"
    for name, values in (("loss", output.loss), ("clipped", output.clipped)):
        if values is not None and values.shape != logprobs.shape:
            return f"gave {name} of shape {list(values.shape)} for {len(logprobs)} tokens"
    return "gave a loss without a gradient" if logprobs.requires_grad and not output.loss.requires_grad else ""


def _from_file(place: str) -> LossFactory:
    """The factory in `path/to/file.py:name`, a file of the user's own machine."""
    path, _, name = place.rpartition(":")
    if not Path(path).is_file():
        raise LossError(f"algorithm.loss: no file {path!r}")
    spec = importlib.util.spec_from_file_location("slipstream_user_loss", path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise LossError(f"algorithm.loss: {path} has no function {name!r}")
    return factory  # type: ignore[no-any-return]
