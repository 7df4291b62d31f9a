"""Losses, one a file, chosen once by algorithm.loss."""

import importlib.util
from pathlib import Path

from configs.algorithm import Algorithm
from configs.errors import SlipstreamError
from learner.losses.base import Loss, LossFactory, LossInputs, LossOutput
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

__all__ = ["LOSSES", "Loss", "LossError", "LossFactory", "LossInputs", "LossOutput", "build_loss"]


class LossError(
    SlipstreamError,
    ValueError,
    code="SLIP-LEARN-02",
    cause="algorithm.loss names a file or function that is not there, or that makes no loss.",
    mend="Correct path/to/file.py:name; docs/algorithms.md.",
):
    """algorithm.loss cannot be used; the message says what it names."""


def build_loss(algorithm: Algorithm) -> Loss:
    """The loss of this configuration.

    Raises:
        LossError: algorithm.loss names a file or a function in it that is not there, or that is no factory of a loss.
    """
    factory = LOSSES.get(algorithm.loss) or _from_file(algorithm.loss)
    loss = factory(algorithm)
    if not callable(loss):
        raise LossError(f"algorithm.loss: {algorithm.loss!r} gave {type(loss).__name__} instead of a loss")
    return loss


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
