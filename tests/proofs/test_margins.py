"""The loop that leaves out tokens that cannot win comes to the margins of the plain definition."""

import numpy as np
import pytest
import torch

from shoal.proofs import margins as margin_loop
from shoal.proofs import noise, sampling


def rows(count: int, vocabulary: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = spread * torch.randn(count, vocabulary, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 4096, (count,), generator=generator)
    return logits, seeds, positions, torch.randint(0, vocabulary, (count,), generator=generator)


@pytest.mark.parametrize(("vocabulary", "spread"), [(1, 1.0), (7, 0.1), (320, 3.0), (320, 30.0), (50_001, 5.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_margins_are_those_of_the_definition(vocabulary: int, spread: float, temperature: float) -> None:
    logits, seeds, positions, tokens = rows(40, vocabulary, spread)
    scores = logits / temperature + noise.gumbel_noise(seeds, positions, vocabulary)
    expected = scores.amax(-1) - scores.gather(-1, tokens[:, None]).squeeze(-1)
    margins, logprobs, _ = sampling.token_margins(logits, seeds, positions, tokens, temperature)
    assert torch.allclose(margins, expected, rtol=1e-5, atol=2e-5)
    chosen = torch.log_softmax(logits / temperature, -1).gather(-1, tokens[:, None]).squeeze(-1)
    assert torch.allclose(logprobs, chosen, atol=1e-5)


@pytest.mark.parametrize(("vocabulary", "spread"), [(3, 1.0), (320, 3.0), (50_001, 5.0)])
def test_rivals_are_the_two_closest_scores_with_their_logits(vocabulary: int, spread: float) -> None:
    logits, seeds, positions, tokens = rows(40, vocabulary, spread)
    scores = logits / 0.8 + noise.gumbel_noise(seeds, positions, vocabulary)
    first = scores.topk(3, dim=-1)
    values = (logits / 0.8).gather(-1, first.indices)
    expected = torch.cat([first.values[:, :1] - first.values[:, 1:], values[:, :1] - values[:, 1:]], dim=-1)
    _, _, rivals = sampling.token_margins(logits, seeds, positions, tokens, 0.8)
    assert torch.allclose(rivals, expected, rtol=1e-5, atol=2e-5)
    assert torch.allclose(sampling._rivals(logits / 0.8, scores), expected)


def test_a_rival_that_does_not_exist_is_infinitely_far_away() -> None:
    logits, seeds, positions, tokens = rows(5, 2, 1.0)
    for rivals in (
        sampling.token_margins(logits, seeds, positions, tokens, 1.0)[2],
        sampling._rivals(logits, logits + noise.gumbel_noise(seeds, positions, 2)),
    ):
        assert rivals[:, [0, 2]].isfinite().all()
        assert rivals[:, [1, 3]].eq(torch.inf).all()


def test_the_winner_of_a_generation_does_not_lose() -> None:
    logits, seeds, positions, _ = rows(200, 320, 4.0)
    winners, _ = sampling.choose_tokens(logits, seeds, positions, 1.0)
    margins, _, _ = sampling.token_margins(logits, seeds, positions, winners, 1.0)
    assert margins.max() <= 2e-6


def test_no_noise_exceeds_the_bound_that_leaves_tokens_out() -> None:
    largest = -np.log(-np.log((2**23 - 0.5) / 2**23))
    assert largest < margin_loop.LARGEST_NOISE < largest + 0.01


def test_no_noise_exceeds_the_bound_that_the_upper_bits_of_its_hash_give() -> None:
    size, bounds = 1 << margin_loop.BOUND_BITS, margin_loop.NOISE_BOUNDS
    assert bounds.shape == (size,)
    assert (np.diff(bounds) > 0).all()
    assert bounds[-1] >= margin_loop.LARGEST_NOISE - 1e-3
    first = (np.arange(size, dtype=np.int64) - size // 2) << (32 - margin_loop.BOUND_BITS)
    for within in (0, (1 << (31 - margin_loop.BOUND_BITS)) + 12345, (1 << (32 - margin_loop.BOUND_BITS)) - 1):
        reached = np.array([margin_loop.noise_of(np.int32(state)) for state in first + within])
        assert (reached < bounds).all()
        assert (reached[1:] > bounds[:-1] - 2e-3).all(), "no bound is that of the next bits"


def test_the_noise_is_that_of_the_definition_to_the_last_places() -> None:
    seeds, positions = torch.tensor([-5, 2**62]), torch.tensor([0, 77])
    expected = noise.gumbel_noise(seeds, positions, 1000)
    low, high = noise.row_keys(seeds, positions)
    for row in range(2):
        own = [margin_loop.noise(token, np.int32(int(low[row])), np.int32(int(high[row]))) for token in range(1000)]
        assert np.allclose(own, expected[row].numpy(), rtol=2e-6, atol=2e-6)
