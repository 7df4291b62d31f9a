"""A correction: weights that fade with the distance between policies. `algorithm.correction: correction.py:fading`."""

from torch import Tensor

from learner.corrections import Rho


def fading(rho: Rho, *, power: float = 0.5) -> Tensor:
    """[n] a weight for each token, without gradient; rho is the trained policy over the one that sampled."""
    return rho.log.clamp(max=0).mul(power).exp()
