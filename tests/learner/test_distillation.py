"""What is learned from teachers: against float64 written out densely, finite differences, and whole steps."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.algorithm import Algorithm
from configs.errors import BadValue
from configs.variants import Choice
from learner.distillation import DISTILLATIONS, Distillation, DistillationInputs
from learner.distillation.top_k import with_tail
from learner.objective import Objective
from learner.objective.teaching import AGREES, COEF, KEPT, KL, metrics_of
from learner.policy import logprobs as head
from learner.policy.logprobs import head_logprobs
from learner.rows import Row
from learner.teacher_view import TeacherView
from slipstream.runtime.variants import VariantFails
from tests.learner.tiny_models import row_of

VOCABULARY, WIDTH, THEIR_WIDTH = 11, 6, 5
LENGTHS = (5, 1, 7, 3)
TOKENS = sum(LENGTHS)
TEMPERATURE, CAP, THEIR_CAP = 0.7, 4.0, 3.0
STEP = 1e-5
Dense = Callable[[Tensor, Tensor], Tensor]
"""[n, V] logprobs of policy and teacher in, [n] divergence out."""


@dataclasses.dataclass
class Models:
    """Hidden states and heads in float64, of the policy and of a teacher."""

    hidden: Tensor
    weight: Tensor
    their_hidden: Tensor
    their_weight: Tensor

    def ours(self) -> Tensor:
        return dense(self.hidden, self.weight, CAP)

    def theirs(self) -> Tensor:
        return dense(self.their_hidden, self.their_weight, THEIR_CAP)


def dense(hidden: Tensor, weight: Tensor, cap: float) -> Tensor:
    logits = cap * torch.tanh(hidden @ weight.T / cap)
    return torch.log_softmax(logits / TEMPERATURE, -1)


def models(seed: int = 0) -> Models:
    torch.manual_seed(seed)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (TOKENS, THEIR_WIDTH), (VOCABULARY, THEIR_WIDTH))
    return Models(*(0.8 * torch.randn(*shape, dtype=torch.float64) for shape in shapes))


def made(these: Models, k: int) -> Row:
    """A row whose tokens have been scored by the teacher, and sampled by a policy that was another one."""
    row = row_of([[1] * (length + 1) for length in LENGTHS])
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    top, ids = these.theirs().sort(1, descending=True)
    values = {
        "targets": targets,
        "behaviour_logprobs": at(these.ours(), targets) + 0.5 * torch.randn(TOKENS, dtype=torch.float64),
        "advantages": torch.randn(TOKENS, dtype=torch.float64),
        "weights": torch.rand(TOKENS, dtype=torch.float64) / TOKENS,
        "teacher_logprobs": at(these.theirs(), targets),
        "teacher": torch.tensor([0, 1, 1, 0]),
    }
    if k:
        values |= {"teacher_ids": ids[:, :k].contiguous(), "teacher_top": top[:, :k].contiguous()}
    return dataclasses.replace(row, step=3, **values)


def at(logprobs: Tensor, targets: Tensor) -> Tensor:
    return logprobs.gather(1, targets[:, None])[:, 0]


def through(these: Models, row: Row, algorithm: Algorithm, direction: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    """The row's loss by way of the output head, with gradients of the policy's two tensors."""
    view = TeacherView(these.their_hidden, these.their_weight, TEMPERATURE, THEIR_CAP, direction) if direction else None  # type: ignore[arg-type]
    row = dataclasses.replace(row, teacher_view=view)
    inputs = (these.hidden.requires_grad_(), these.weight.requires_grad_(), row.targets, TEMPERATURE)
    found = head_logprobs(*inputs, softcap=CAP, ids=row.teacher_ids, teacher=view)
    return Objective(algorithm, ["a", "b"])(row, *found)


def merged(kept: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Probabilities of the teacher's first `kept` tokens, and of all others together."""

    def merge(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        order = theirs.argsort(1, descending=True)
        parts = [logprobs.exp().gather(1, order) for logprobs in (ours, theirs)]
        p, q = (torch.cat([one[:, :kept], one[:, kept:].sum(1, keepdim=True)], 1) for one in parts)
        return p, q

    return merge


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(1)


def reverse(kept: int) -> Dense:
    return lambda ours, theirs: kl(*merged(kept)(ours, theirs))


def forward(kept: int) -> Dense:
    return lambda ours, theirs: kl(*reversed(merged(kept)(ours, theirs)))


CASES: dict[str, tuple[dict[str, Any], Dense, str]] = {
    "top_k reverse": ({"top_k": {"k": 3}}, reverse(3), ""),
    "top_k forward": ({"top_k": {"k": 3, "direction": "forward"}}, forward(3), ""),
    "top_k of all": ({"top_k": {"k": VOCABULARY}}, reverse(VOCABULARY), ""),
    "full reverse": ({"full": {}}, reverse(VOCABULARY), "reverse"),
    "full forward": ({"full": {"direction": "forward"}}, forward(VOCABULARY), "forward"),
}


def differences(value: Callable[[], float], parameter: Tensor) -> Tensor:
    """Central finite differences."""
    found, flat = torch.zeros_like(parameter), parameter.detach().view(-1)
    for i in range(len(flat)):
        held = flat[i].item()
        flat[i] = held + STEP
        above = value()
        flat[i] = held - STEP
        found.view(-1)[i] = (above - value()) / (2 * STEP)
        flat[i] = held
    return found


def compare(these: Models, loss: Tensor, reference: Callable[[Models], Tensor]) -> None:
    """The value, and the gradients against finite differences of the reference."""
    loss.backward()
    assert loss.item() == pytest.approx(reference(these).item(), abs=1e-12)
    worst = 0.0
    for parameter in (these.hidden, these.weight):
        wanted = differences(lambda: reference(these).item(), parameter)
        assert parameter.grad is not None and wanted.abs().max() > 1e-3
        worst = max(worst, float((parameter.grad - wanted).abs().max()))
    print(f"largest difference of a gradient from finite differences: {worst:.1e}")
    assert worst <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_divergences_are_those_of_dense_distributions(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * 6)
    choice, divergence, direction = CASES[case]
    ((name, options),) = choice.items()
    options = {"coef": 0.4, "task": 0.0, "coef_end": 1.0, "over_steps": 6, **options}  # in step 3: 0.7
    these = models()
    row = made(these, options.get("k", 0))
    loss, measured = through(these, row, Algorithm(distillation={name: options}), direction)
    compare(these, loss, lambda now: 0.7 * row.weights @ divergence(now.ours(), now.theirs()))
    best = these.theirs().argmax(1)
    assert measured[AGREES] == (best == row.targets).sum()
    assert measured[KL].item() == pytest.approx(divergence(these.ours(), these.theirs()).sum().item())
    assert measured[KEPT] == TOKENS and measured[COEF].item() == pytest.approx(0.7)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimates_on_sampled_tokens_are_weighed_by_the_ratio(estimator: str) -> None:
    these = models()
    row = made(these, 0)
    held = at(these.ours(), row.targets)
    choice = {"sampled": {"estimator": estimator, "task": 0.0, "coef": 0.5, "truncate": 1.5}}

    def reference(now: Models) -> Tensor:
        weight = (held - row.behaviour_logprobs).exp().clamp(max=1.5)
        assert (weight == 1.5).any() and (weight < 1).any()
        d = at(now.ours(), row.targets) - at(now.theirs(), row.targets)
        return 0.5 * row.weights @ (weight * (d**2 / 2 if estimator == "k2" else (-d).exp() - 1 + d))

    compare(these, through(these, row, Algorithm(distillation=choice))[0], reference)


def test_a_teachers_logprobs_are_advantages_under_the_clip_of_the_loss() -> None:
    these = models()
    row = made(these, 0)
    choice = {"sampled_advantage": {"coef": 0.3, "task": 0.5, "first_tokens": 2}}
    taught = torch.tensor([i < 2 for length in LENGTHS for i in range(length)])

    def reference(now: Models) -> Tensor:
        said = 0.3 * (row.teacher_logprobs - row.behaviour_logprobs) * taught  # type: ignore[operator]
        advantages, ratio = 0.5 * row.advantages + said, (at(now.ours(), row.targets) - row.behaviour_logprobs).exp()
        return row.weights @ torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))

    loss, measured = through(these, row, Algorithm(distillation=choice))
    compare(these, loss, reference)
    assert measured["clipped"] > 0 and measured[KEPT] == taught.sum()


def test_far_tokens_keep_a_gradient_of_the_right_sign() -> None:
    """Where a divergence is held, for its size, the gradient goes on in the right direction."""
    now, far = torch.tensor([-1.0, -60.0], dtype=torch.float64).requires_grad_(), torch.tensor([-90.0, -1.0])
    for estimator, least in (("k2", 20.0), ("k3", 1.0)):
        inputs = DistillationInputs(logprobs=now, behaviour_logprobs=now.detach(), teacher_logprobs=far.double())
        kl = Distillation(DISTILLATIONS.build(Choice("sampled", {"estimator": estimator})))(inputs).kl
        (gradient,) = torch.autograd.grad(kl.sum(), now)
        assert gradient[0] >= least * 0.99 and gradient[1] < -1, "the first is unlearned, the second learned"
        assert gradient.abs().max() <= 150


def test_a_tail_that_is_rounding_alone_says_nothing() -> None:
    """At k = vocabulary the tails of two float32 sums are noise, and the merged divergence is the whole one."""
    these = models()
    ours, theirs = (
        logprobs.detach().float().sort(1, descending=True).values for logprobs in (these.ours(), these.theirs())
    )
    noisy = with_tail(ours + 3e-7), with_tail(theirs - 3e-7)
    tail = (noisy[0].exp() * (noisy[0] - noisy[1]))[:, -1]
    assert tail.abs().max() == 0.0


def test_tokens_are_left_out_where_the_teacher_is_unsure_or_the_answer_is_long() -> None:
    these = models()
    row = made(these, 4)
    sure = these.theirs().max(1).values.exp()
    bound = float(sure.median())
    places = torch.tensor([i for length in LENGTHS for i in range(length)])
    kept = (sure >= bound) & (places < 3)
    assert 0 < kept.sum() < (sure >= bound).sum()
    own = torch.tensor([False, True, True, False]).repeat_interleave(torch.tensor(LENGTHS))
    for choice, direction in (("top_k", ""), ("full", "reverse")):
        options = {"min_confidence": bound, "first_tokens": 3, "task": 0.0} | ({"k": 4} if choice == "top_k" else {})
        loss, measured = through(these, row, Algorithm(distillation={choice: options}), direction)
        divergence = reverse(4 if choice == "top_k" else VOCABULARY)(these.ours(), these.theirs())
        assert loss.item() == pytest.approx((row.weights * divergence * kept).sum().item())
        values = {name: float(value) for name, value in measured.items()}
        found = metrics_of(values, TOKENS)
        assert found["distill/masked"] == pytest.approx(1 - kept.sum().item() / TOKENS)
        assert found["distill/kl"] == pytest.approx(divergence[kept].mean().item())
        assert found["distill/kl/b"] == pytest.approx(divergence[kept & own].mean().item())
        assert found.keys() == {f"distill/{name}" for name in ("kl", "kl/a", "kl/b", "masked", "coef", "agreement")}
    assert metrics_of({}, 3) == {}


def test_what_a_correction_refuses_teaches_nothing() -> None:
    these = models()
    row = made(these, 0)
    row.behaviour_logprobs[0] = -40.0  # the first answer has five tokens
    choice: dict[str, Any] = {"distillation": {"sampled": {"task": 0.0}}}
    free, _ = through(these, row, Algorithm(**choice))
    held, measured = through(these, row, Algorithm(**choice, veto_high=100.0))
    assert measured["refused"] == LENGTHS[0] and 0 < held.item() < free.item()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("top_k", "option 'k' of 'top_k': Field required"),
        ({"sampled": {"estimator": "k1"}}, "option 'estimator' of 'sampled': .*'k2' or 'k3'"),
        ({"sampled": {"k": 3}}, "'sampled' has no option 'k'; it has estimator, truncate, coef, coef_end, over_steps"),
        ({"full": {"min_confidence": 1.0}}, "option 'min_confidence' of 'full': .*less than 1"),
    ],
)
def test_options_are_those_of_the_kind_and_those_that_all_have(choice: Any, said: str) -> None:
    with pytest.raises(BadValue, match=said):
        DISTILLATIONS.build(Choice.of(choice))


OWN = """
from learner.distillation import declare

@declare(gives="logprobs")
def hinge(inputs, *, least: float = 1.0):
    return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(inputs.teacher_logprobs - inputs.logprobs).clamp(min=least)", ""),
        ("(inputs.teacher_logprobs - inputs.logprobs).mean()", "gave no value for each of 16 tokens"),
    ],
)
def test_a_distillation_of_ones_own_has_the_options_of_all(tmp_path: Path, returned: str, said: str) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("RETURNED", returned))
    these = models()
    row = made(these, 0)
    algorithm = Algorithm(distillation={f"{tmp_path}/own.py:hinge": {"least": 0.25, "task": 0.0, "coef": 2.0}})
    if said:
        with pytest.raises(VariantFails, match=said):
            through(these, row, algorithm)
        return
    kl = (row.teacher_logprobs - at(these.ours(), row.targets)).clamp(min=0.25)
    assert through(these, row, algorithm)[0].item() == pytest.approx(2 * (row.weights @ kl).item())
