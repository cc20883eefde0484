"""The chunked head against plain autograd over full logits."""

import pytest
import torch

from shoal.policy.architecture import HeadLogits
from shoal.training.model.logprobs import token_logprobs
from support.allocations import LargestResult


@pytest.mark.parametrize("head_logits", [HeadLogits(), HeadLogits(cap=3.0), HeadLogits(0.6), HeadLogits(1.7, 3.0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 20])
def test_values_and_gradients_equal_those_of_full_logits(
    head_logits: HeadLogits, with_bias: bool, chunk_elements: int
) -> None:
    torch.manual_seed(0)
    states = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(13, 5, requires_grad=True)
    bias = torch.randn(13, requires_grad=True) if with_bias else None
    targets = torch.tensor([0, 12, 3, 3, 5, 1, 7])
    leaves = [leaf for leaf in (states, weight, bias) if leaf is not None]

    logprobs, entropies, variances = token_logprobs(
        states, weight, bias, targets, temperature=0.7, head_logits=head_logits, chunk_elements=chunk_elements
    )
    logits = torch.nn.functional.linear(states, weight, bias) * head_logits.scale
    logits = (head_logits.cap * torch.tanh(logits / head_logits.cap) if head_logits.cap else logits) / 0.7
    table = torch.log_softmax(logits, -1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)

    mixed = torch.randn(2, 7)
    ours = torch.autograd.grad((mixed[0] * logprobs).sum() + (mixed[1] * entropies).sum(), leaves)
    theirs = torch.autograd.grad((mixed[0] * expected[0]).sum() + (mixed[1] * expected[1]).sum(), leaves)
    torch.testing.assert_close((logprobs, entropies), expected)
    spread = (table.exp() * (table + expected[1][:, None]).square()).sum(1)
    torch.testing.assert_close(variances, spread.detach(), atol=1e-5, rtol=1e-4)
    assert not variances.requires_grad
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_extreme_logits_stay_finite() -> None:
    states = torch.tensor([[1e4, -1e4]], requires_grad=True)
    logprobs, entropies, variances = token_logprobs(states, torch.eye(2), None, torch.tensor([1]), temperature=1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), states)
    assert logprobs.item() == -2e4
    assert (entropies.item(), variances.item()) == (0.0, 0.0)
    assert gradient.isfinite().all()


def test_no_tokens() -> None:
    states = torch.zeros(0, 4, requires_grad=True)
    logprobs, _, _ = token_logprobs(states, torch.zeros(3, 4), None, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    assert logprobs.shape == (0,)


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    tokens, width, vocabulary, chunk = 256, 4, 500, 8
    states, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.arange(tokens) % vocabulary
    with LargestResult() as largest:
        logprobs, entropies, _ = token_logprobs(
            states, weight, None, targets, temperature=1.0, chunk_elements=chunk * vocabulary
        )
        torch.autograd.backward((logprobs + entropies).sum())
    assert weight.grad is not None
    assert chunk * vocabulary <= largest.elements < 2 * chunk * vocabulary < tokens * vocabulary
