"""Chunked logprobs against the dense log-softmax, values, gradients and what is kept between them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.policy import logprobs
from learner.policy.logprobs import CHUNK_BYTES, TILE, head_logprobs


def dense(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("with_entropy", "softcap"), [(False, None), (True, None), (True, 3.0)])
def test_agrees_with_dense(
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    temperature: float,
    dtype: torch.dtype,
    tolerance: float,
    with_entropy: bool,
    softcap: float | None,
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 50 * chunk)
    torch.manual_seed(0)
    hidden, weight = torch.randn(21, 16).to(dtype), torch.randn(50, 16).to(dtype)
    targets, upstream, other = torch.randint(0, 50, (21,)), torch.randn(21), torch.randn(21)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, entropy = head_logprobs(*ours, targets, temperature, softcap=softcap)
    logits = theirs[0].float() @ theirs[1].float().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected, expected_entropy = dense(logits, targets, temperature)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for logprob, uncertainty in ((found, entropy), (expected, expected_entropy)):
        (logprob @ upstream + uncertainty @ other * with_entropy).backward()
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.grad is not None and their.grad is not None and mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad, their.grad, rtol=tolerance, atol=tolerance)


@settings(max_examples=50)
@given(st.integers(0, 3000), st.integers(1 << 16, 1 << 29))
def test_chunks_cover_all_tokens_in_order_and_are_as_large_as_memory_allows(tokens: int, vocabulary: int) -> None:
    targets, weight = torch.empty(tokens, device="meta"), torch.empty(vocabulary, 1, device="meta")
    parts = [range(tokens)[part] for part in logprobs._chunks(targets, weight)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])][: len(parts)]
    assert (parts[-1].stop if parts else 0) == tokens
    assert all(len(part) == 1 or 4 * vocabulary * len(part) <= CHUNK_BYTES for part in parts)
    for part in parts[:-1]:
        assert 4 * vocabulary * (len(part) + TILE) > CHUNK_BYTES, "another tile of tokens has no room"
        assert len(part) < TILE or len(part) % TILE == 0


def test_products_of_16_bit_are_not_rounded_to_16_bit() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 512, dtype=torch.bfloat16), torch.randn(100, 512, dtype=torch.bfloat16)
    targets = torch.randint(0, 100, (64,))
    found, _ = head_logprobs(hidden, weight, targets, 1.0)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    assert float((found - exact).abs().max()) < 1e-3


def test_no_logits_wait_for_the_backward() -> None:
    hidden = torch.randn(4096, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        head_logprobs(hidden, weight, torch.zeros(4096, dtype=torch.int64), 1.0)
    assert sum(sizes) == hidden.nbytes + weight.nbytes + 4096 * (8 + 4 + 4)
