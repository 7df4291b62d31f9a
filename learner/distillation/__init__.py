"""Distillation: what is learned from teachers, one way a file, chosen once by algorithm.distillation."""

from collections.abc import Callable
from typing import Any

from configs.algorithm import Algorithm
from learner.distillation.base import COMMON, DistillationFacts, DistillationInputs, DistillationOutput
from learner.distillation.base import declare as declare
from learner.distillation.full import full
from learner.distillation.sampled import sampled, sampled_advantage
from learner.distillation.top_k import top_k
from slipstream.runtime.variants import Kind, Variant

DISTILLATIONS: Kind[DistillationFacts] = Kind(
    "algorithm.distillation",
    "inputs",
    {kind.__name__: kind for kind in (sampled_advantage, sampled, top_k, full)},
    undeclared=DistillationFacts(),
)
DEFAULTS = {name: parameter.default for name, parameter in COMMON.items()}


class Distillation:
    """The one of a run, with the options that all have."""

    def __init__(self, variant: Variant[DistillationFacts]) -> None:
        self.name, self.facts, self.options = variant.name, variant.facts, DEFAULTS | dict(variant.options)
        self._call: Callable[[DistillationInputs], Any] = variant.guarded(_problem_with)
        self.task, self.first_tokens = float(self.options["task"]), int(self.options["first_tokens"])
        """Factor of advantages from rewards, and tokens of an answer that are taught; 0 for all."""

    def coefficient(self, step: int) -> float:
        """Factor of the divergence in a step."""
        coef, end, over = (self.options[name] for name in ("coef", "coef_end", "over_steps"))
        return float(coef if end is None else coef + (end - coef) * min(1.0, step / over))

    def __call__(self, inputs: DistillationInputs) -> DistillationOutput:
        """Of a row."""
        return _output(self._call(inputs))


def build_distillation(algorithm: Algorithm) -> Distillation | None:
    """The distillation of this configuration; None without one. Raises BadValue."""
    return None if algorithm.distillation is None else Distillation(DISTILLATIONS.build(algorithm.distillation))


def _output(given: Any) -> DistillationOutput:
    return given if isinstance(given, DistillationOutput) else DistillationOutput(kl=given)


def _problem_with(given: Any, inputs: DistillationInputs) -> str:
    """Why it is no divergence of these [n] tokens; empty where it is."""
    output, shape = _output(given), inputs.logprobs.shape
    if getattr(output.kl, "shape", None) != shape or (output.kept is not None and output.kept.shape != shape):
        return f"gave no value for each of {len(inputs.logprobs)} tokens; return [n] divergences, and [n] bool for kept"
    return ""
