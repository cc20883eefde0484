"""Commitments to hidden states: 258 bytes per 32 states that only someone who ran the model can know.

In: chunks of states (bf16, or cast to it). Out: for each chunk the polynomial over GF(65497) through its k = 128 largest
entries, in the format of `toploc` 0.1.6; or, for a claimed proof, how far it is from the verifier's own states. Often several
entries tie for the k-th place. Ties go to the lowest index here and to any index in `toploc`, so that its bytes differ then; a
comparison accepts every choice among them. A chunk with fewer than k values commits to all of them. Parsing is strict:
whatever does not have the one right length, an earned modulus and reduced coefficients is a ProofError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import ShoalError

CHUNK_TOKENS = 32
TOP_K = 128
MODULUS = 65497
LOWEST_MODULUS = MODULUS - 256
"""A smaller modulus would let a forger fold many positions onto one point. Each candidate fails for about one honest index
set in eight, so that 256 failures in a row do not happen."""
DEGENERATE_ZEROS = 5
"""Honest coefficients are zero once in 65497 times: five in one proof have a probability below 10⁻¹⁵."""
WORST_MANTISSA_ERROR = 128.0
"""Reported when no exponent agrees; larger than any difference of two 7-bit mantissas."""


class ProofError(ShoalError):
    """A proof that is not one, or states that cannot be committed to; `code` says which rule was broken."""

    permanent = False

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


@dataclass(frozen=True)
class ParsedProof:
    """A well-formed proof: coefficients in ascending order, each below 65497."""

    modulus: int
    coefficients: NDArray[np.uint16]
    degenerate: bool
    """Of low degree or nearly empty: a formula, not the interpolation of measured values."""


class ChunkDifference(NamedTuple):
    """How a proof differs from the verifier's states at the verifier's own top-k places."""

    exponent_mismatches: int
    mantissa_mean: float
    """Mean |difference| of the 7-bit mantissas, over the values whose exponents agree."""
    mantissa_median: float
    """The upper median of the same."""
    compared: int
    """How many values were compared: 128, or all of a smaller chunk."""
    degenerate: bool
    sign_mismatches: int = 0
    """Values whose exponents agree and whose signs do not; toploc ignores them, a constant polynomial cannot."""


def split_chunks(states_ND: Tensor) -> list[Tensor]:
    """Views of 32 states each; the last one holds the rest."""
    count = states_ND.shape[0]
    if count <= CHUNK_TOKENS:
        return [states_ND] if count else []
    return [*torch.split(states_ND, CHUNK_TOKENS)]


def proof_bytes(value_count: int) -> int:
    """The exact size of the proof of a chunk with this many values."""
    return 2 + 2 * min(TOP_K, value_count)


def build_proofs(chunks: Sequence[Tensor]) -> list[bytes]:
    """One proof per chunk, in order."""
    from shoal.proofs import kernels

    if not chunks:
        return []
    counts = [chunk.numel() for chunk in chunks]
    bits, offsets = _bit_patterns(chunks, counts)
    proofs_CK = np.zeros((len(chunks), 1 + TOP_K), dtype=np.uint16)
    status = np.zeros(len(chunks), dtype=np.int8)
    kernels.build_all(bits, offsets, max(counts), TOP_K, LOWEST_MODULUS, _inverses(), proofs_CK, status)
    _require_usable(status)
    wire = proofs_CK.astype(">u2").tobytes()
    return [wire[row * proof_bytes(TOP_K) :][: proof_bytes(count)] for row, count in enumerate(counts)]


def parse_proof(data: bytes, value_count: int) -> ParsedProof:
    """Read the proof of a chunk with `value_count` values; refuse anything that an honest prover cannot write."""
    words_1K = _read_words([data], [value_count])
    size = min(TOP_K, value_count)
    return ParsedProof(int(words_1K[0, 0]), words_1K[0, 1 : 1 + size], bool(_degenerate(words_1K, [value_count])[0]))


def compare_chunks(proofs: Sequence[bytes], chunks: Sequence[Tensor]) -> list[ChunkDifference]:
    """The difference of each proof from the verifier's states of the same chunk."""
    from shoal.proofs import kernels

    if len(proofs) != len(chunks):
        raise ProofError("proof_count", f"{len(proofs)} proofs for {len(chunks)} chunks.")
    if not chunks:
        return []
    counts = [chunk.numel() for chunk in chunks]
    words_CK = _read_words(proofs, counts)
    bits, offsets = _bit_patterns(chunks, counts)
    results = np.zeros((len(chunks), 5), dtype=np.int64)
    status = np.zeros(len(chunks), dtype=np.int8)
    kernels.compare_all(bits, offsets, max(counts), words_CK, results, status)
    _require_usable(status)
    return _differences(results, _degenerate(words_CK, counts))


def _read_words(proofs: Sequence[bytes], value_counts: Sequence[int]) -> NDArray[np.uint16]:
    """One row per proof: modulus, coefficients, zeros up to the full width. Everything in it has been checked."""
    lengths, sizes = [len(data) for data in proofs], [proof_bytes(count) for count in value_counts]
    if lengths != sizes:
        length, size = next(pair for pair in zip(lengths, sizes, strict=True) if pair[0] != pair[1])
        raise ProofError("proof_length", f"A proof of {length} bytes instead of {size}.")
    whole = proof_bytes(TOP_K)
    padded = b"".join(proofs if min(sizes) == whole else [data.ljust(whole, b"\0") for data in proofs])
    words_CK = np.frombuffer(padded, dtype=">u2").astype(np.uint16).reshape(len(proofs), 1 + TOP_K)
    lowest = np.where(np.array(value_counts) <= MODULUS, MODULUS, LOWEST_MODULUS)
    unearned = (words_CK[:, 0] < lowest) | (words_CK[:, 0] > MODULUS)
    if unearned.any():
        row = int(unearned.argmax())
        raise ProofError("proof_modulus", f"Modulus {words_CK[row, 0]} is outside {lowest[row]} to {MODULUS}.")
    if (words_CK[:, 1:] >= MODULUS).any():
        raise ProofError("proof_coefficient", f"A coefficient is not below {MODULUS}.")
    return words_CK


def _degenerate(words_CK: NDArray[np.uint16], value_counts: Sequence[int]) -> NDArray[np.bool_]:
    sizes = np.minimum(TOP_K, value_counts)
    zeros = sizes - np.count_nonzero(words_CK[:, 1:], axis=1)
    return np.asarray(zeros >= np.minimum(DEGENERATE_ZEROS, sizes))


def _differences(results: NDArray[np.int64], degenerate: NDArray[np.bool_]) -> list[ChunkDifference]:
    exponents, signs, error_sums, medians, compared = results.T
    agreeing = compared - exponents
    means = np.where(agreeing > 0, error_sums / np.maximum(agreeing, 1), WORST_MANTISSA_ERROR)
    medians = np.where(agreeing > 0, medians.astype(float), WORST_MANTISSA_ERROR)
    columns = exponents, means, medians, compared, degenerate, signs
    return [ChunkDifference(*row) for row in zip(*[column.tolist() for column in columns], strict=True)]


def _bit_patterns(
    chunks: Sequence[Tensor], value_counts: Sequence[int]
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """The raw bf16 patterns of all chunks end to end, on the CPU, and where each chunk starts."""
    if not all(value_counts):
        raise ProofError("states_empty", "A chunk holds no states.")
    offsets = np.cumsum([0, *value_counts], dtype=np.int64)
    return _joined(chunks, offsets).detach().to(torch.bfloat16).cpu().view(torch.uint16).numpy(), offsets


def _joined(chunks: Sequence[Tensor], offsets: NDArray[np.int64]) -> Tensor:
    """The values of all chunks end to end; without a copy where they already lie so, as parts of one tensor do."""
    first = chunks[0]
    capacity = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    places = (first.data_ptr() + first.element_size() * offsets[:-1]).tolist()
    if (
        capacity >= offsets[-1]
        and [chunk.data_ptr() for chunk in chunks] == places
        and all(chunk.dtype is first.dtype and chunk.is_contiguous() for chunk in chunks)
    ):
        return first.as_strided((int(offsets[-1]),), (1,))
    return torch.cat([chunk.reshape(-1) for chunk in chunks])


def _require_usable(status: NDArray[np.int8]) -> None:
    from shoal.proofs import kernels

    if not status.any():
        return
    chunk = int(status.nonzero()[0][0])
    if status[chunk] == kernels.STATUS_NOT_FINITE:
        raise ProofError("states_not_finite", f"The states of chunk {chunk} hold an infinity or a NaN.")
    raise ProofError("states_no_modulus", f"No modulus from {LOWEST_MODULUS} keeps the entries of chunk {chunk} apart.")


@lru_cache(maxsize=1)
def _inverses() -> NDArray[np.uint32]:
    """1/x for every field element (0 at 0), by x⁻¹ = −⌊p/x⌋·(p mod x)⁻¹."""
    table = [0, 1]
    for x in range(2, MODULUS):
        table.append(-(MODULUS // x) * table[MODULUS % x] % MODULUS)
    return np.array(table, dtype=np.uint32)
