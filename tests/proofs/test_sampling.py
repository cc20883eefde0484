"""Seeded sampling: the same bits everywhere, noise of good quality, and margins that only the winner has at zero."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shoal.proofs import choose_tokens, gumbel_noise, hash_bits, hash_bits_np, sampling, token_margins

# (seed, position, token id) → 23 bits. Changing one of these breaks every run in flight.
VECTORS = [
    (0, 0, 0, 5783174),
    (0, 0, 1, 7758618),
    (0, 1, 0, 2839964),
    (1, 0, 0, 2079170),
    (0xFFFFFFFFFFFFFFFF, 0, 0, 680930),
    (0x8000000000000000, 31, 49151, 5097699),
    (0x123456789ABCDEF, 4095, 151935, 6854454),
    (0xDEADBEEFCAFEF00D, 32767, 262143, 7491808),
]


def scalar_hash(seed: int, position: int, token: int) -> int:
    """The definition in plain integers, one value at a time."""

    def signed(value: int, bits: int) -> int:
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> (bits - 1) else value

    key = signed(seed + (position + 1) * 0x9E3779B97F4A7C15, 64)
    key = signed((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9, 64)
    key = signed((key ^ (key >> 27)) * 0x94D049BB133111EB, 64)
    key ^= key >> 31
    state = signed(token * 0x9E3779B1 + key, 32)
    state = signed((state ^ (state >> 16)) * 0x7FEB352D, 32)
    state = signed(((state ^ (state >> 15)) + (key >> 32)) * 0x846CA68B, 32)
    state = signed((state ^ (state >> 16)) * 0xC2B2AE35, 32)
    return (state >> 9) + (1 << 22)


def as_torch(seeds: NDArray[np.uint64]) -> torch.Tensor:
    return torch.from_numpy(seeds.view(np.int64))


def random_rows(rows: int, seed: int = 0) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**64, rows, dtype=np.uint64), generator.integers(0, 40_000, rows)


@pytest.mark.parametrize(("seed", "position", "token", "bits"), VECTORS)
def test_hash_matches_the_test_vectors(seed: int, position: int, token: int, bits: int) -> None:
    assert scalar_hash(seed, position, token) == bits
    assert int(hash_bits_np(np.array(seed, np.uint64), position, token)) == bits


def test_numpy_vector_and_scalar_give_the_same_bits() -> None:
    seeds, positions = random_rows(500)
    tokens = np.random.default_rng(1).integers(0, 200_000, 500)
    expected = [scalar_hash(int(s), int(i), int(t)) for s, i, t in zip(seeds, positions, tokens, strict=True)]
    assert hash_bits_np(seeds, positions, tokens).tolist() == expected


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_torch_gives_the_bits_of_numpy(rows: int) -> None:
    seeds, positions = random_rows(rows)
    bits = hash_bits(as_torch(seeds), torch.from_numpy(positions), 7_001)
    assert np.array_equal(bits.numpy(), hash_bits_np(seeds[:, None], positions[:, None], np.arange(7_001)))


def test_noise_is_the_gumbel_transform_of_the_bits() -> None:
    seeds, positions = random_rows(40)
    uniform = (hash_bits_np(seeds[:, None], positions[:, None], np.arange(700)).astype(np.float64) + 0.5) / 2**23
    noise = gumbel_noise(as_torch(seeds), torch.from_numpy(positions), 700).double().numpy()
    np.testing.assert_allclose(noise, -np.log(-np.log(uniform)), rtol=1e-6, atol=3e-7)


def test_noise_does_not_depend_on_batch_blocks_or_vocabulary() -> None:
    seeds, positions = random_rows(6)
    whole = gumbel_noise(as_torch(seeds), torch.from_numpy(positions), 60_000)
    for row in range(6):
        alone = gumbel_noise(as_torch(seeds[row : row + 1]), torch.from_numpy(positions[row : row + 1]), 1_000)
        torch.testing.assert_close(whole[row, :1_000], alone[0], rtol=1e-6, atol=1e-6)


def test_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0.5, 2**23 - 0.5]) / 2**23
    noise = -torch.log(-torch.log(ends))
    assert torch.isfinite(noise).all()
    assert noise[1] > 16.6


def deviation(counts: NDArray[np.int64]) -> float:
    """Chi-square of equal cells, in standard deviations."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1)))


def joint_counts(left: NDArray[np.uint32], right: NDArray[np.uint32], shift: int) -> NDArray[np.int64]:
    cells = ((left >> shift) & 127).astype(np.int64) * 128 + ((right >> shift) & 127)
    return np.bincount(cells.ravel(), minlength=128 * 128)


@pytest.mark.parametrize("shift", [0, 8, 16], ids=["low", "middle", "high"])
@pytest.mark.parametrize("neighbours", ["tokens", "positions", "seeds"])
def test_neighbours_are_independent_and_uniform(neighbours: str, shift: int) -> None:
    tokens = np.arange(8_000)[None, :]
    rows = np.arange(50)[:, None]
    if neighbours == "seeds":
        bits = hash_bits_np(rows.astype(np.uint64), 3, tokens)
    else:
        bits = hash_bits_np(np.array(12345, np.uint64), rows, tokens)
    left, right = (bits[:, :-1], bits[:, 1:]) if neighbours == "tokens" else (bits[:-1], bits[1:])
    assert abs(deviation(joint_counts(left, right, shift))) < 5


@pytest.mark.parametrize(("field", "bit_count"), [("seed", 64), ("position", 15), ("token", 18)])
def test_each_input_bit_flips_each_output_bit_half_of_the_time(field: str, bit_count: int) -> None:
    count = 20_000
    seeds, positions = random_rows(count)
    tokens = np.random.default_rng(2).integers(0, 150_000, count)
    base = hash_bits_np(seeds, positions, tokens)
    for bit in range(bit_count):
        flipped = hash_bits_np(
            seeds ^ np.uint64(1 << bit) if field == "seed" else seeds,
            positions ^ (1 << bit) if field == "position" else positions,
            tokens ^ (1 << bit) if field == "token" else tokens,
        )
        rates = (((base ^ flipped)[:, None] >> np.arange(23)) & 1).mean(axis=0)
        assert np.abs(rates - 0.5).max() < 5 * 0.5 / np.sqrt(count)


def test_the_upper_tail_has_the_right_weight() -> None:
    seeds, positions = random_rows(60)
    bits = hash_bits_np(seeds[:, None], positions[:, None], np.arange(50_000))
    for tail_bits in (6, 9, 12):
        expected = bits.size / 2**tail_bits
        assert abs(np.count_nonzero(bits >= 2**23 - 2 ** (23 - tail_bits)) - expected) < 5 * np.sqrt(expected)


def test_tokens_follow_the_softmax_at_the_given_temperature() -> None:
    rows, temperature = 40_000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    tokens, logprobs = choose_tokens(logits.expand(rows, -1), torch.full((rows,), 99), torch.arange(rows), temperature)
    probabilities = torch.softmax(logits / temperature, dim=0)
    frequencies = torch.bincount(tokens, minlength=5) / rows
    assert ((frequencies - probabilities).abs() < 5 * (probabilities / rows).sqrt()).all()
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_chosen_token_has_margin_zero_and_others_lose(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 3_000, generator=generator) * 3).to(dtype)
    seeds, positions = torch.arange(64) - 32, torch.arange(64)
    tokens, logprobs = choose_tokens(logits, seeds, positions, 0.9)
    margins, again, _ = token_margins(logits, seeds, positions, tokens, 0.9)
    assert margins.eq(0).all()
    torch.testing.assert_close(again, logprobs)
    others, _, _ = token_margins(logits, seeds, positions, (tokens + 1) % 3_000, 0.9)
    assert (others > 0).all()


def test_rows_are_sampled_the_same_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, seeds, positions = torch.randn(9, 50_000, generator=generator), torch.arange(9), torch.arange(9) * 7
    tokens, _ = choose_tokens(logits, seeds, positions, 1.0)
    for row in range(9):
        one = slice(row, row + 1)
        assert choose_tokens(logits[one], seeds[one], positions[one], 1.0)[0] == tokens[row]


def test_ties_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "fill_noise", lambda noise, low, high: noise.zero_())
    tokens, _ = choose_tokens(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]), torch.zeros(2), torch.zeros(2), 1.0)
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_cannot_be_scored_never_passes(poison: float) -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = poison
    margins, _, _ = token_margins(logits, torch.tensor([5]), torch.tensor([0]), torch.tensor([3]), 1.0)
    assert margins.item() == float("inf")


def test_a_token_masked_out_of_the_vocabulary_loses_infinitely() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 6:] = -torch.inf
    margins, _, _ = token_margins(logits, torch.tensor([5]), torch.tensor([0]), torch.tensor([7]), 1.0)
    assert margins.item() == float("inf")


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        choose_tokens(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1), temperature)


def test_no_rows_give_no_tokens() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    tokens, logprobs = choose_tokens(torch.zeros(0, 4), empty, empty, 1.0)
    assert tokens.shape == logprobs.shape == (0,)


def test_inference_mode_and_gradients_do_not_get_in_the_way() -> None:
    logits, seeds, positions = torch.randn(2, 77, requires_grad=True), torch.arange(2), torch.arange(2)
    with torch.inference_mode():
        tokens, _ = choose_tokens(logits, seeds, positions, 1.0)
    margins, logprobs, _ = token_margins(logits, seeds, positions, tokens.clone(), 1.0)
    assert margins.eq(0).all()
    assert not logprobs.requires_grad
