"""Both ways with the real toploc 0.1.6, built from source: random states, wide ones, partial chunks, real activations."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.commitments import ToplocProcess
from shoal.proofs import TOP_K, build_proofs, compare_chunks, split_chunks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toploc() -> Iterator[Any]:
    with ToplocProcess() as process:
        yield process


def random_states(tokens: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(tokens, width, generator=generator).to(torch.bfloat16)


def real_states() -> Tensor:
    """What the bundled policy really commits to: its states over completions that it sampled itself."""
    from shoal.policy import GenerationRequest, ScoreRequest, TorchEngine, bundled_directory

    engine = TorchEngine(bundled_directory(), eos_token_ids=(1,))
    prompts = [tuple(range(10 + i, 40 + i)) for i in range(80)]
    requests = [GenerationRequest(prompt, seed, 90) for seed, prompt in enumerate(prompts)]
    completions = engine.generate(requests, temperature=1.0)
    scored = engine.score(
        [ScoreRequest(r.prompt_tokens, tuple(c.tokens), r.seed) for r, c in zip(requests, completions, strict=True)],
        temperature=1.0,
    )
    return torch.cat([row.states for row in scored])


def tied_at_the_last_place(chunk: Tensor) -> bool:
    magnitudes = chunk.abs().flatten().sort(descending=True).values
    return bool(magnitudes[TOP_K - 1] == magnitudes[TOP_K])


def check_both_ways(toploc: Any, states: Tensor, noisy: Tensor) -> set[int]:
    """Equal bytes wherever the index set is unique, equal differences there too; return the moduli that occurred."""
    chunks, noisy_chunks = split_chunks(states), split_chunks(noisy)
    ours, (theirs, _) = build_proofs(chunks), toploc.build(states)
    unique = [not tied_at_the_last_place(chunk) for chunk in chunks]
    assert all(own == other for own, other, one in zip(ours, theirs, unique, strict=True) if one)
    assert {one.exponent_mismatches for one in compare_chunks(theirs, chunks)} == {0}, "any choice among ties is right"
    compared_by_us = compare_chunks(theirs, noisy_chunks)
    compared_by_toploc, _ = toploc.verify(noisy, ours)
    for chunk, one, mine, yours in zip(noisy_chunks, unique, compared_by_us, compared_by_toploc, strict=True):
        if one and not tied_at_the_last_place(chunk):
            assert (mine.exponent_mismatches, mine.mantissa_mean, mine.mantissa_median) == yours
        assert mine.exponent_mismatches <= 38
        assert yours[0] <= 38
        assert max(mine.mantissa_mean, yours[1]) <= 10
    assert sum(unique) >= 3
    return {int.from_bytes(proof[:2], "big") for proof in ours}


def noisy(states: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (states.float() * (1 + 0.004 * torch.randn(states.shape, generator=generator))).to(torch.bfloat16)


@pytest.mark.parametrize(("tokens", "width"), [(32 * 40, 64), (32 * 20 + 5, 576), (32 * 40, 2048)])
def test_random_states_both_ways(toploc: Any, tokens: int, width: int) -> None:
    states = random_states(tokens, width)
    check_both_ways(toploc, states, noisy(states))


def test_wide_states_both_ways_with_smaller_moduli(toploc: Any) -> None:
    states = random_states(32 * 120, 5120)
    assert min(check_both_ways(toploc, states, noisy(states))) < 65_497


def test_real_activations_both_ways(toploc: Any) -> None:
    states = real_states()
    check_both_ways(toploc, states, noisy(states))
