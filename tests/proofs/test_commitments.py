"""Commitments: the bytes of toploc 0.1.6, exact selection, a parser that nothing gets past, and visible forgeries."""

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.proofs import ChunkDifference, ProofError, build_proofs, compare_chunks, parse_proof, split_chunks
from shoal.proofs.commitments import LOWEST_MODULUS, MODULUS, TOP_K

GOLDEN = json.loads((Path(__file__).parent / "golden_toploc.json").read_text())


def golden_states(seed: int, tokens: int, width: int) -> Tensor:
    """The states behind the golden file; RandomState streams are frozen for good."""
    values = np.random.RandomState(seed).standard_t(4, (tokens, width)).astype(np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


def with_noise(seed: int, states: Tensor) -> Tensor:
    factors = 1 + 0.01 * np.random.RandomState(seed + 1000).randn(*states.shape).astype(np.float32)
    return (states.float() * torch.from_numpy(factors)).to(torch.bfloat16)


def random_states(tokens: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def lagrange(points: list[int], values: list[int]) -> list[int]:
    """The interpolation in plain integers, slowly: sum of yᵢ·Π(x − xⱼ)/(xᵢ − xⱼ)."""
    total = [0] * len(points)
    for i, (x_i, y_i) in enumerate(zip(points, values, strict=True)):
        basis, scale = [1], y_i
        for j, x_j in enumerate(points):
            if j != i:
                basis = [(a - x_j * b) % MODULUS for a, b in zip([0, *basis], [*basis, 0], strict=True)]
                scale = scale * pow(x_i - x_j, -1, MODULUS) % MODULUS
        total = [(t + scale * b) % MODULUS for t, b in zip(total, basis, strict=True)]
    return total


def bit_patterns(chunk: Tensor) -> np.ndarray:
    return chunk.reshape(-1).view(torch.uint16).numpy().astype(np.int64)


def expected_proof(chunk: Tensor) -> bytes:
    """The definition, step by step, with ties to the lowest index."""
    return committing_to(chunk, np.argsort(-(bit_patterns(chunk) & 0x7FFF), kind="stable")[:TOP_K].tolist())


def committing_to(chunk: Tensor, chosen: list[int]) -> bytes:
    """The proof that commits to these places."""
    bits, indices = bit_patterns(chunk), sorted(chosen)
    modulus = next(m for m in range(MODULUS, 0, -1) if len({i % m for i in indices}) == len(indices))
    coefficients = lagrange([i % modulus for i in indices], bits[indices].tolist())
    return b"".join(word.to_bytes(2, "big") for word in (modulus, *coefficients))


def states_with_top(indices: list[int], value_count: int) -> Tensor:
    """One chunk whose largest entries are exactly at these indices."""
    flat = torch.full((value_count,), 0.5)
    flat[indices] = torch.linspace(100, 200, len(indices))
    return flat.to(torch.bfloat16).reshape(1, -1)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['tokens']}x{case['width']}-{case['modulus']}")
def test_bytes_and_differences_are_those_of_toploc(case: dict[str, object]) -> None:
    seed, tokens, width = (int(str(case[key])) for key in ("seed", "tokens", "width"))
    states = golden_states(seed, tokens, width)
    proof = base64.b64decode(str(case["proof"]))
    assert build_proofs([states]) == [proof]
    [difference] = compare_chunks([proof], [with_noise(seed, states)])
    assert [difference.exponent_mismatches, difference.mantissa_mean, difference.mantissa_median] == case["noisy"]


def test_golden_cases_cover_moduli_below_the_prime() -> None:
    assert {case["modulus"] for case in GOLDEN} >= {65497, 65496, 65495}


@pytest.mark.parametrize(("tokens", "width"), [(32, 16), (3, 17), (1, 1), (1, 127), (1, 128), (1, 129), (32, 100)])
def test_proofs_follow_the_definition(tokens: int, width: int) -> None:
    chunk = random_states(tokens, width)
    assert build_proofs([chunk]) == [expected_proof(chunk)]


@pytest.mark.parametrize("width", [40, 6_000])
def test_ties_at_the_last_place_go_to_the_lowest_index(width: int) -> None:
    chunk = random_states(32, width).sign()
    assert build_proofs([chunk]) == [expected_proof(chunk)]


def tied_states(tokens: int, width: int, seed: int) -> Tensor:
    """States on a coarse grid, of both signs: many entries tie for the last place."""
    return (random_states(tokens, width, seed).float() * 2).round().div(2).to(torch.bfloat16)


def places(chunk: Tensor) -> tuple[list[int], list[int], int]:
    """Places above the last magnitude, those that tie for it, and how many of these a proof commits to."""
    magnitudes = bit_patterns(chunk) & 0x7FFF
    limit = np.sort(magnitudes)[-TOP_K]
    above, tied = np.flatnonzero(magnitudes > limit).tolist(), np.flatnonzero(magnitudes == limit).tolist()
    return above, tied, TOP_K - len(above)


@pytest.mark.parametrize(("tokens", "width"), [(32, 16), (32, 64), (5, 300), (32, 2500)])
@pytest.mark.parametrize("seed", range(3))
def test_a_proof_may_commit_to_any_of_the_entries_that_tie_for_the_last_place(
    tokens: int, width: int, seed: int
) -> None:
    chunk = tied_states(tokens, width, seed)
    above, tied, wanted = places(chunk)
    assert len(tied) > wanted
    choices = [tied[-wanted:], random.Random(seed).sample(tied, wanted)]
    for difference in compare_chunks([committing_to(chunk, above + choice) for choice in choices], [chunk, chunk]):
        assert difference == ChunkDifference(0, 0.0, 0.0, TOP_K, False, 0)


def test_values_of_another_magnitude_are_no_ties() -> None:
    chunk = tied_states(32, 64, 7)
    above, tied, wanted = places(chunk)
    smaller = [index for index in range(chunk.numel()) if index not in {*above, *tied}][: wanted - 2]
    [difference] = compare_chunks([committing_to(chunk, above + tied[:2] + smaller)], [chunk])
    assert difference.exponent_mismatches + difference.sign_mismatches + difference.mantissa_mean > 0
    assert difference.exponent_mismatches >= (wanted - 2) // 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40_000), st.integers(0, 7))
def test_selection_is_exact_for_any_size_and_any_number_of_ties(seed: int, value_count: int, kept_bits: int) -> None:
    from shoal.proofs import kernels

    patterns = np.random.default_rng(seed).integers(0, 0x7F80, value_count).astype(np.uint16)
    patterns &= np.uint16((0xFFFF << (14 - 2 * kept_bits)) & 0xFFFF)
    patterns |= np.random.default_rng(seed + 1).integers(0, 2, value_count).astype(np.uint16) << 15
    count = min(TOP_K, value_count)
    indices = np.empty(count, np.int64)
    largest = kernels.select_top(patterns, count, kernels.scratch_for(value_count), indices)
    magnitudes = (patterns & 0x7FFF).astype(np.int64)
    assert indices.tolist() == sorted(np.argsort(-magnitudes, kind="stable")[:count].tolist())
    assert largest == magnitudes.max()


def test_every_inverse_in_the_table_is_one() -> None:
    from shoal.proofs.commitments import _inverses

    table = _inverses().astype(np.int64)
    assert ((np.arange(1, MODULUS) * table[1:]) % MODULUS == 1).all()


def test_reduction_is_right_at_the_edges() -> None:
    from shoal.proofs import kernels

    edges = [0, 1, MODULUS - 1, MODULUS, 2 * MODULUS, 65_535, 65_536, MODULUS**2 - 1, MODULUS**2, 2**32 - 1]
    for value in edges + [random.Random(0).randrange(2**32) for _ in range(200)]:
        assert kernels.reduced(value) == value % MODULUS


def test_the_modulus_is_the_largest_that_keeps_the_indices_apart() -> None:
    spread = list(range(0, 126 * 500, 500))
    for blocked in (1, 2, 5):
        indices = [*spread, *(spread[j] + MODULUS - j for j in range(blocked))]
        [proof] = build_proofs([states_with_top(indices[: TOP_K + blocked], 200_000)])
        assert proof == expected_proof(states_with_top(indices[: TOP_K + blocked], 200_000))
        assert LOWEST_MODULUS <= int.from_bytes(proof[:2], "big") <= MODULUS


def test_many_chunks_in_one_call_give_what_each_gives_alone() -> None:
    chunks = [random_states(32, 96, 1), random_states(5, 96, 2), random_states(1, 40, 3), random_states(32, 2_100, 4)]
    proofs = build_proofs(chunks)
    assert proofs == [build_proofs([chunk])[0] for chunk in chunks]
    assert [len(proof) for proof in proofs] == [258, 258, 82, 258]
    assert compare_chunks(proofs, chunks) == [
        compare_chunks([proof], [chunk])[0] for proof, chunk in zip(proofs, chunks, strict=True)
    ]


def test_where_chunks_lie_in_memory_does_not_matter() -> None:
    """Neighbours are read in place; every other order is put together first."""
    states = random_states(96, 70)
    first, second, third = split_chunks(states)
    whole = build_proofs([first.clone(), second.clone(), third.clone()])
    assert build_proofs([first, second, third]) == whole
    assert build_proofs([second, third]) == whole[1:]
    assert build_proofs([third, first]) == [whole[2], whole[0]]
    assert build_proofs([second, second]) == [whole[1]] * 2
    assert build_proofs([first, third]) == [whole[0], whole[2]]
    assert build_proofs([first, second.float(), third]) == whole
    wide = torch.cat([states, states * 3], dim=1)
    assert build_proofs(split_chunks(wide[:, :70])) == whole
    assert build_proofs(split_chunks(wide.t()[:70].t())) == whole


def test_states_in_other_dtypes_and_layouts_are_cast() -> None:
    states = random_states(32, 50)
    proofs = build_proofs([states])
    assert build_proofs([states.float()]) == proofs
    assert build_proofs([states.t().contiguous().t()]) == proofs
    assert build_proofs([states.clone().float().requires_grad_()]) == proofs


def test_states_are_cut_every_32_tokens() -> None:
    assert [chunk.shape[0] for chunk in split_chunks(torch.zeros(70, 3))] == [32, 32, 6]
    assert split_chunks(torch.zeros(0, 3)) == []
    assert build_proofs([]) == []
    assert compare_chunks([], []) == []


@pytest.mark.parametrize("case", [case for case in GOLDEN if case["tokens"] == 32], ids=lambda case: case["modulus"])
def test_own_states_do_not_differ(case: dict[str, int]) -> None:
    chunk = golden_states(case["seed"], case["tokens"], case["width"])
    assert compare_chunks(build_proofs([chunk]), [chunk]) == [ChunkDifference(0, 0.0, 0.0, 128, False, 0)]


def test_small_noise_is_small_and_other_states_are_not() -> None:
    chunk = random_states(32, 576)
    near, far = compare_chunks(build_proofs([chunk]) * 2, [with_noise(0, chunk), random_states(32, 576, 9)])
    assert near.exponent_mismatches <= 20
    assert near.mantissa_mean < 4
    assert far.exponent_mismatches >= 100


def test_flipped_signs_are_counted() -> None:
    chunk = random_states(32, 64)
    assert compare_chunks(build_proofs([chunk]), [-chunk]) == [ChunkDifference(0, 0.0, 0.0, 128, False, 128)]


def test_without_one_common_exponent_the_mantissas_are_as_bad_as_can_be() -> None:
    chunk = random_states(4, 16)
    [difference] = compare_chunks(build_proofs([chunk]), [chunk * 4])
    assert difference == ChunkDifference(64, 128.0, 128.0, 64, False, 0)


def proof_of(coefficients: list[int], modulus: int = MODULUS) -> bytes:
    return b"".join(word.to_bytes(2, "big") for word in (modulus, *coefficients))


@pytest.mark.parametrize("degree", [0, 1, 60, 122])
def test_constant_and_low_polynomials_are_degenerate(degree: int) -> None:
    coefficients = [17 + i for i in range(degree + 1)] + [0] * (TOP_K - degree - 1)
    [difference] = compare_chunks([proof_of(coefficients)], [random_states(32, 576)])
    assert difference.degenerate


def test_sparse_polynomials_are_degenerate_and_single_zeros_are_not() -> None:
    sparse = [5 if i % 8 == 7 else 0 for i in range(TOP_K)]
    assert parse_proof(proof_of(sparse), 10_000).degenerate
    assert not parse_proof(proof_of([0, *range(1, TOP_K - 3), 0, 0, 0]), 10_000).degenerate


def test_a_constant_polynomial_shows_in_the_signs_too() -> None:
    chunk = random_states(32, 576)
    typical = int(chunk.abs().flatten().topk(TOP_K).values.median().view(torch.int16))
    [difference] = compare_chunks([proof_of([typical] + [0] * (TOP_K - 1))], [chunk])
    assert difference.sign_mismatches > 30


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_states_that_are_not_finite_are_refused_by_name(poison: float) -> None:
    chunk = random_states(32, 64)
    proofs = build_proofs([chunk, chunk])
    broken = chunk.clone()
    broken[31, 63] = poison
    with pytest.raises(ProofError, match="chunk 1") as built:
        build_proofs([chunk, broken])
    with pytest.raises(ProofError, match="chunk 1") as compared:
        compare_chunks(proofs, [chunk, broken])
    assert built.value.code == compared.value.code == "states_not_finite"


def test_the_largest_nan_pattern_does_not_wrap_around_the_field() -> None:
    chunk = torch.full((1, 8), 0xFFFF, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    with pytest.raises(ProofError) as refused:
        build_proofs([chunk])
    assert refused.value.code == "states_not_finite"


def test_empty_chunks_are_refused() -> None:
    with pytest.raises(ProofError) as refused:
        build_proofs([torch.zeros(0, 8)])
    assert refused.value.code == "states_empty"


def test_indices_that_no_allowed_modulus_keeps_apart_are_refused() -> None:
    # Sixteen steps and sixteen strides: their differences are all numbers from the lowest modulus to the highest.
    indices = [*range(16), *(LOWEST_MODULUS + 15 + 16 * stride for stride in range(17))]
    differences = {high - low for low in indices for high in indices}
    assert differences >= set(range(LOWEST_MODULUS, MODULUS + 1))
    rest = range(100_000, 100_000 + TOP_K - len(indices))
    with pytest.raises(ProofError) as refused:
        build_proofs([states_with_top([*indices, *rest], 300_000)])
    assert refused.value.code == "states_no_modulus"


@pytest.mark.parametrize(
    ("data", "value_count", "code"),
    [
        (b"", 18_432, "proof_length"),
        (b"\xff", 18_432, "proof_length"),
        (proof_of([1] * 127), 18_432, "proof_length"),
        (proof_of([1] * 129), 18_432, "proof_length"),
        (proof_of([1] * 128) + b"\0", 18_432, "proof_length"),
        (proof_of([1] * 128), 64, "proof_length"),
        (proof_of([0] * 128, modulus=0), 18_432, "proof_modulus"),
        (proof_of([1] * 128, modulus=1), 18_432, "proof_modulus"),
        (proof_of([1] * 128, modulus=576), 18_432, "proof_modulus"),
        (proof_of([1] * 128, modulus=MODULUS - 1), 18_432, "proof_modulus"),
        (proof_of([1] * 128, modulus=MODULUS + 1), 18_432, "proof_modulus"),
        (proof_of([1] * 128, modulus=LOWEST_MODULUS - 1), 163_840, "proof_modulus"),
        (proof_of([1] * 127 + [MODULUS]), 18_432, "proof_coefficient"),
        (proof_of([65_535] + [1] * 127), 18_432, "proof_coefficient"),
    ],
)
def test_malformed_proofs_are_refused_with_their_reason(data: bytes, value_count: int, code: str) -> None:
    with pytest.raises(ProofError) as refused:
        parse_proof(data, value_count)
    assert refused.value.code == code


def test_large_chunks_may_have_earned_a_smaller_modulus() -> None:
    assert parse_proof(proof_of([1] * 128, modulus=LOWEST_MODULUS), 163_840).modulus == LOWEST_MODULUS


def test_the_number_of_proofs_must_be_exact() -> None:
    chunk = random_states(32, 16)
    for proofs in ([], build_proofs([chunk]) * 2):
        with pytest.raises(ProofError) as refused:
            compare_chunks(proofs, [chunk])
        assert refused.value.code == "proof_count"


def test_a_hundred_thousand_malformed_proofs_get_typed_refusals() -> None:
    generator = random.Random(0)
    honest = build_proofs([random_states(32, 64)])[0]
    codes: dict[str, int] = {}
    while sum(codes.values()) < 100_000:
        data, value_count = mutated(honest, generator)
        try:
            proof = parse_proof(data, value_count)
        except ProofError as error:
            codes[error.code] = codes.get(error.code, 0) + 1
        else:
            assert proof.modulus <= MODULUS
            assert proof.coefficients.max() < MODULUS
            assert len(data) == 2 + 2 * proof.coefficients.size
    assert set(codes) == {"proof_length", "proof_modulus", "proof_coefficient"}


def mutated(honest: bytes, generator: random.Random) -> tuple[bytes, int]:
    value_count = generator.choice((2_048, 163_840, 64, 1))
    kind = generator.randrange(5)
    if kind == 0:
        return generator.randbytes(generator.randrange(600)), value_count
    if kind == 1:
        return honest[: generator.randrange(len(honest))], value_count
    if kind == 2:
        return honest + generator.randbytes(generator.randrange(1, 300)), value_count
    if kind == 3:
        return generator.randbytes(2) + honest[2:], value_count
    place = 2 * generator.randrange(1, 129)
    return honest[:place] + generator.randrange(MODULUS, 65_536).to_bytes(2, "big") + honest[place + 2 :], value_count


def test_well_formed_but_random_proofs_are_compared_without_harm() -> None:
    generator = np.random.default_rng(0)
    chunk = random_states(32, 64)
    proofs = [proof_of(generator.integers(0, MODULUS, TOP_K).tolist()) for _ in range(200)]
    differences = compare_chunks(proofs, [chunk] * 200)
    assert min(difference.exponent_mismatches for difference in differences) > 100
