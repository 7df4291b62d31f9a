"""Distillation's terms of the output head on a GPU: memory at the sizes of a 1.7B model, and values near float64."""

from typing import Any

import pytest
import torch

from learner.policy.logprobs import CHUNK_BYTES, head_logprobs
from learner.step import take_peak_bytes
from learner.teacher_view import TeacherView
from tests.gpu.test_learner_cuda import GPU, cosine, pytestmark  # noqa: F401

TOKENS, VOCABULARY, HIDDEN = 16_384, 151_936, 2048


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=GPU) * scale).bfloat16()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_whole_vocabulary_of_a_teacher_needs_the_memory_of_a_chunk(direction: Any) -> None:
    """Beside the gradients of hidden states and head, two chunks of float32 logits and their gradient in 16 bit."""
    hidden, weight = drawn(TOKENS, HIDDEN).requires_grad_(), drawn(VOCABULARY, HIDDEN, scale=0.02).requires_grad_()
    view = TeacherView(drawn(TOKENS, HIDDEN), drawn(VOCABULARY, HIDDEN, scale=0.02), 1.0, None, direction)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device=GPU)
    take_peak_bytes(GPU)
    before = torch.cuda.memory_allocated(GPU)
    head_logprobs(hidden, weight, targets, 1.0, teacher=view)[2].sum().backward()
    needed = take_peak_bytes(GPU) - before
    chunk = CHUNK_BYTES * (4 + 4 + 2) // 8
    gradients = VOCABULARY * HIDDEN * (4 + 2) + TOKENS * HIDDEN * 2
    print(f"{direction}: {needed / 2**30:.3f} GiB, a chunk and the gradients are {(chunk + gradients) / 2**30:.3f} GiB")
    assert needed <= 1.1 * (chunk + gradients) < 4 * TOKENS * VOCABULARY


@pytest.mark.parametrize("direction", ["", "reverse", "forward"])
def test_terms_of_distillation_are_near_float64(direction: Any) -> None:
    """Logprobs of further tokens (no direction), and divergences, with their gradients."""
    torch.manual_seed(0)
    tokens, vocabulary, size, temperature, k = 777, 50_021, 128, 0.7, 20
    hidden, weight = drawn(tokens, size, scale=2).requires_grad_(), drawn(vocabulary, size, scale=0.5).requires_grad_()
    theirs = drawn(tokens, size, scale=2), drawn(vocabulary, size, scale=0.5)
    targets = torch.randint(0, vocabulary, (tokens,), device=GPU)
    ids = torch.stack([torch.randperm(vocabulary, device=GPU)[:k] for _ in range(tokens)])
    given = {"teacher": TeacherView(*theirs, temperature, None, direction)} if direction else {"ids": ids}
    logprobs, _, third, *_ = head_logprobs(hidden, weight, targets, temperature, **given)
    upstream, other = torch.randn(tokens, device=GPU), torch.randn(third.shape, device=GPU)
    torch.autograd.backward([logprobs, third], [upstream, other])
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1].T / temperature, -1)
    log_q = torch.log_softmax(theirs[0].double() @ theirs[1].double().T / temperature, -1)
    expected = {
        "": lambda: log_p.gather(1, ids),
        "reverse": lambda: (log_p.exp() * (log_p - log_q)).sum(1),
        "forward": lambda: (log_q.exp() * (log_q - log_p)).sum(1),
    }[direction]()
    own = log_p.gather(1, targets[:, None])[:, 0]
    torch.autograd.backward([own, expected], [upstream.double(), other.double()])
    torch.testing.assert_close(third.double(), expected, rtol=1e-4, atol=1e-3)
    for found, wanted in zip((hidden, weight), exact, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert cosine(found.grad.flatten(), wanted.grad.flatten()) > 0.9999
