"""Compiled inner loops of the commitments: selection, interpolation and evaluation over GF(65497).

In: the bf16 bit patterns of all chunks, end to end, with their offsets. Out: arrays with one row per chunk. No kernel
raises; a chunk that cannot be used gets a status. Field elements are uint32: the product of two of them plus a third
fits into 32 bits, so every loop over points runs in SIMD lanes. Importing this module imports numba (0.5 s); the first
use on a machine compiles for some seconds, later ones load the result from numba's cache.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.proofs.commitments import MODULUS

STATUS_OK, STATUS_NOT_FINITE, STATUS_NO_MODULUS = 0, 1, 2

_P = np.uint32(MODULUS)
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80
_COLUMNS, _BLOCK = 512, 64
_ONE = np.uint64(1)

Bits = NDArray[np.uint16]
Field = NDArray[np.uint32]
Index = NDArray[np.int64]
Scratch = tuple[Bits, NDArray[np.int32], Bits]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(function))


@compiled
def reduced(value: int | np.unsignedinteger[Any]) -> np.uint32:
    """value mod 65497 for value < 2³²; in 32 bits, so that the compiler can use SIMD lanes."""
    return np.uint32(np.uint32(value) % _P)


@compiled
def evaluate(coefficients: NDArray[Any], points: Field, values: Field) -> None:
    """Horner's rule at all points side by side; coefficients ascending."""
    values[: points.size] = coefficients[-1]
    for j in range(coefficients.size - 2, -1, -1):
        coefficient = np.uint32(coefficients[j])
        for i in range(points.size):
            values[i] = reduced(values[i] * points[i] + coefficient)


@compiled
def build_all(
    bits: Bits,
    offsets: Index,
    longest: int,
    wanted: int,
    lowest_modulus: int,
    inverses: Field,
    proofs: Bits,
    status: NDArray[np.int8],
) -> None:
    """Row c of `proofs` becomes the modulus and the coefficients of chunk c; unused places stay as they are."""
    indices, scratch = np.empty(wanted, np.int64), scratch_for(longest)
    points, values = np.empty(wanted, np.uint32), np.empty(wanted, np.uint32)
    work, seen = np.empty((3, wanted + 1), np.uint32), np.zeros(MODULUS, np.int8)
    for chunk in range(offsets.size - 1):
        own = bits[offsets[chunk] : offsets[chunk + 1]]
        count = min(wanted, own.size)
        if select_top(own, count, scratch, indices) >= _INFINITY:
            status[chunk] = STATUS_NOT_FINITE
            continue
        modulus = injective_modulus(indices[:count], own.size, lowest_modulus, seen)
        if modulus == 0:
            status[chunk] = STATUS_NO_MODULUS
            continue
        for i in range(count):
            points[i], values[i] = indices[i] % modulus, own[indices[i]]
        proofs[chunk, 0] = modulus
        interpolate(points[:count], values[:count], inverses, work, proofs[chunk, 1 : count + 1])
        status[chunk] = STATUS_OK


@compiled
def compare_all(
    bits: Bits, offsets: Index, longest: int, proofs: Bits, results: Index, status: NDArray[np.int8]
) -> None:
    """Row c of `results`: exponent mismatches, sign mismatches, sum and upper median of the mantissa errors, values."""
    wanted = proofs.shape[1] - 1
    indices, scratch = np.empty(wanted, np.int64), scratch_for(longest)
    points, claimed = np.empty(wanted, np.uint32), np.empty(wanted, np.uint32)
    for chunk in range(offsets.size - 1):
        own = bits[offsets[chunk] : offsets[chunk + 1]]
        count = min(wanted, own.size)
        if select_top(own, count, scratch, indices) >= _INFINITY:
            status[chunk] = STATUS_NOT_FINITE
            continue
        for i in range(count):
            points[i] = indices[i] % np.int64(proofs[chunk, 0])
        evaluate(proofs[chunk, 1 : count + 1], points[:count], claimed[:count])
        take_other_ties(own, proofs[chunk], indices[:count], claimed)
        count_differences(own, indices[:count], claimed, results[chunk])
        status[chunk] = STATUS_OK


@compiled
def take_other_ties(own: Bits, proof: Bits, indices: Index, claimed: Field) -> None:
    """Moves tied places at which the proof has another value to tied places at which it has the right one.

    Entries that tie for the last place are equally large, and provers may commit to any of them. A proof that did has exactly
    that magnitude at the places it chose; a forged one hits it at another place once in 32,768 times.
    """
    limit = _MAGNITUDE
    for i in range(indices.size):
        limit = min(limit, np.uint16(own[indices[i]] & _MAGNITUDE))
    last = 0
    for i in range(indices.size):
        if (own[indices[i]] & _MAGNITUDE) == limit:
            last = indices[i]
    place, point, value = 0, np.empty(1, np.uint32), np.empty(1, np.uint32)
    for other in range(last + 1, own.size):  # ties went to the lowest indices, so the others come after
        while place < indices.size and (
            (own[indices[place]] & _MAGNITUDE) != limit or (claimed[place] & _MAGNITUDE) == limit
        ):
            place += 1
        if place == indices.size:
            return
        if (own[other] & _MAGNITUDE) == limit:
            point[0] = other % np.int64(proof[0])
            evaluate(proof[1 : indices.size + 1], point, value)
            if (value[0] & _MAGNITUDE) == limit:
                indices[place], claimed[place] = other, value[0]


@compiled
def count_differences(own: Bits, indices: Index, claimed: Field, result: Index) -> None:
    result[:] = 0
    result[4] = indices.size
    errors = np.zeros(128, np.int64)
    for i in range(indices.size):
        ours, theirs = np.int64(own[indices[i]]), np.int64(claimed[i])
        if (ours ^ theirs) & _INFINITY:
            result[0] += 1
            continue
        result[1] += (ours ^ theirs) >> 15
        error = abs((ours & 127) - (theirs & 127))
        result[2] += error
        errors[error] += 1
    below = errors[0]
    while below <= (indices.size - result[0]) // 2 and result[3] < 127:
        result[3] += 1
        below += errors[result[3]]


@compiled
def select_top(bits: Bits, wanted: int, scratch: Scratch, indices: Index) -> int:
    """Write the `wanted` indices of largest magnitude, ascending, ties to the lowest; return the largest magnitude.

    At least `wanted` values reach the wanted-th largest of any maxima of disjoint parts, so most values are never looked at again.
    """
    maxima, candidates, magnitudes = scratch
    largest = fill_maxima(bits, maxima)
    found = find_candidates(bits, kth_largest(maxima, wanted), candidates)
    for i in range(found):
        magnitudes[i] = bits[candidates[i]] & _MAGNITUDE
    keep_largest(magnitudes[:found], candidates, wanted, indices)
    return largest


@compiled
def scratch_for(longest: int) -> Scratch:
    """What `select_top` needs for chunks of at most `longest` values."""
    return np.empty(_COLUMNS, np.uint16), np.empty(longest, np.int32), np.empty(longest, np.uint16)


@compiled
def fill_maxima(bits: Bits, maxima: Bits) -> int:
    """The largest magnitude in each column of the values, laid out in rows of constant length, and the largest of all.

    The columns are compared side by side in SIMD lanes. Slices are taken first: an index that might count from the end keeps the
    compiler from using them.
    """
    maxima[:] = 0
    rows = bits.size // _COLUMNS
    for row in range(rows):
        own = bits[row * _COLUMNS : (row + 1) * _COLUMNS]
        for i in range(_COLUMNS):
            maxima[i] = max(maxima[i], np.uint16(own[i] & _MAGNITUDE))
    rest = bits[rows * _COLUMNS :]
    for i in range(rest.size):
        maxima[i] = max(maxima[i], np.uint16(rest[i] & _MAGNITUDE))
    largest = 0
    for maximum in maxima:
        largest = max(largest, int(maximum))
    return largest


@compiled
def find_candidates(bits: Bits, floor: int, candidates: NDArray[np.int32]) -> int:
    """The indices of all magnitudes from `floor` on, ascending; returns how many there are."""
    found, least = 0, np.uint16(floor)
    blocks = bits.size // _BLOCK
    for block in range(blocks):
        own, reached, maximum = bits[block * _BLOCK : (block + 1) * _BLOCK], np.uint64(0), np.uint16(0)
        for i in range(_BLOCK):
            maximum = max(maximum, np.uint16(own[i] & _MAGNITUDE))
        if maximum < least:
            continue
        for i in range(_BLOCK):
            reached |= np.uint64(np.uint16(own[i] & _MAGNITUDE) >= least) << np.uint64(i)
        while reached:
            candidates[found] = block * _BLOCK + ones((reached & (~reached + _ONE)) - _ONE)
            found += 1
            reached &= reached - _ONE
    for i in range(blocks * _BLOCK, bits.size):
        if np.uint16(bits[i] & _MAGNITUDE) >= least:
            candidates[found] = i
            found += 1
    return found


@compiled
def ones(word: np.uint64) -> int:
    """How many bits are set; one instruction."""
    count = 0
    while word:
        count += 1
        word &= word - _ONE
    return count


@compiled
def keep_largest(magnitudes: Bits, candidates: NDArray[np.int32], wanted: int, indices: Index) -> None:
    limit = kth_largest(magnitudes, wanted)
    ties = wanted
    for i in range(magnitudes.size):
        ties -= magnitudes[i] > limit
    kept = 0
    for i in range(magnitudes.size):
        if magnitudes[i] < limit or (magnitudes[i] == limit and ties == 0):
            continue
        ties -= magnitudes[i] == limit
        indices[kept] = candidates[i]
        kept += 1


@compiled
def kth_largest(magnitudes: Bits, k: int) -> int:
    """The largest limit that at least k of the 15-bit magnitudes reach; 0 if there are fewer than k."""
    limit = 0
    for bit in range(14, -1, -1):
        guess, reached = np.uint16(limit | (1 << bit)), np.uint32(0)
        for magnitude in magnitudes:
            reached += np.uint32(magnitude >= guess)
        if reached >= k:
            limit = int(guess)
    return limit


@compiled
def injective_modulus(indices: Index, value_count: int, lowest: int, seen: NDArray[np.int8]) -> int:
    """The largest modulus ≤ 65497 that keeps the indices apart, or 0 if there is none above `lowest` − 1."""
    if value_count <= MODULUS:
        return MODULUS
    for modulus in range(MODULUS, lowest - 1, -1):
        collisions = 0
        for index in indices:
            collisions += seen[index % modulus]
            seen[index % modulus] = 1
        for index in indices:
            seen[index % modulus] = 0
        if collisions == 0:
            return modulus
    return 0


@compiled
def interpolate(points: Field, values: Field, inverses: Field, work: Field, coefficients: Bits) -> None:
    """Coefficients, ascending, of the polynomial through (points, values).

    With M = Π(x − xᵢ) and sᵢ = yᵢ / M′(xᵢ), c_j = Σ_l M_{j+1+l} · h_l where h_l = Σᵢ sᵢ·xᵢˡ: about 3k² products
    without one inverse in the inner loops.
    """
    count = points.size
    master, powers, sums = work[0], work[1], work[2]
    expand_roots(points, master)
    for j in range(count):
        sums[j] = reduced(master[j + 1] * np.uint32(j + 1))
    evaluate(sums[:count], points, powers)
    for i in range(count):
        powers[i] = reduced(values[i] % _P * inverses[powers[i]])
    for power in range(count):
        total = np.uint64(0)
        for i in range(count):
            total += powers[i]
        sums[power] = total % np.uint64(MODULUS)
        for i in range(count):
            powers[i] = reduced(powers[i] * points[i])
    for j in range(count):
        total = np.uint64(0)
        for power in range(count - j):
            total += np.uint64(master[j + 1 + power]) * np.uint64(sums[power])
        coefficients[j] = total % np.uint64(MODULUS)


@compiled
def expand_roots(points: Field, master: Field) -> None:
    """Coefficients of Π(x − xᵢ), ascending."""
    master[:] = 0
    master[0] = 1
    for degree in range(points.size):
        negative = np.uint32(_P - points[degree])
        for j in range(degree + 1, 0, -1):
            master[j] = reduced(master[j] * negative + master[j - 1])
        master[0] = reduced(master[0] * negative)
