"""What a delta could weigh at best: the entropy of which weights changed and by how much.

A coder that knows nothing but the rate of change and the histogram of steps cannot pass it. Ours also knows the exponent of each
weight, so bound ÷ payload may exceed 1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]


def bound_bytes(base: U16, new: U16) -> float:
    """n·(H(p) + p·H(step)) for bf16 bit patterns, with steps between integers in the order of the numbers."""
    changed = np.flatnonzero(base != new)
    rate = len(changed) / len(base)
    steps = (_ordered(new[changed]) - _ordered(base[changed])).astype(np.uint16)
    positions = _entropy_bits(np.array([len(changed), len(base) - len(changed)]))
    return len(base) * (positions + rate * _entropy_bits(np.bincount(steps))) / 8


def _ordered(bits: U16) -> U16:
    return np.where(bits >> 15, ~bits, bits | 0x8000).astype(np.uint16)


def _entropy_bits(counts: NDArray[Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
