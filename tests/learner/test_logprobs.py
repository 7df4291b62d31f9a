"""Chunked logprobs against the dense log-softmax, values, gradients and what is kept between them."""

import pytest
import torch

from learner import logprobs
from learner.logprobs import head_logprobs


def dense(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_agrees_with_dense(monkeypatch, keep_bytes, chunk, temperature, dtype, tolerance):
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(logprobs, "KEEP_LOGITS_BYTES", keep_bytes)
    torch.manual_seed(0)
    hidden, weight = torch.randn(21, 16).to(dtype), torch.randn(50, 16).to(dtype)
    targets, upstream = torch.randint(0, 50, (21,)), torch.randn(21)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, entropy = head_logprobs(*ours, targets, temperature)
    expected, expected_entropy = dense(theirs[0] @ theirs[1].T, targets, temperature)
    assert found.dtype == torch.float32 and not entropy.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    found.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None and mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_wait_for_the_backward_and_no_float32_ones(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 256)
    hidden = torch.randn(4096, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}
    for keep_bytes in (0, 1 << 30):
        monkeypatch.setattr(logprobs, "KEEP_LOGITS_BYTES", keep_bytes)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            head_logprobs(hidden, weight, torch.zeros(4096, dtype=torch.int64), 1.0)
        kept[keep_bytes] = sum(sizes)
    inputs = hidden.nbytes + weight.nbytes + 4096 * 8
    assert kept == {0: inputs, 1 << 30: inputs + 4096 * 64 * 2}
