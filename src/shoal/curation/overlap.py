"""Texts that say the same: exact and near duplicates, and overlap with a set that must stay unseen. Pure.

Words are what remains of a text without case, punctuation and spacing; numbers and signs between them stay, because they make a
problem another one. Near duplicates are found by MinHash over n-grams of words (Broder 1997) with banding, then confirmed by the
true Jaccard similarity, so a hash collision never drops anything.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3

_WORD = re.compile(r"\w+|[+\-*/=<>^%]")
HASHES = 64
BANDS = 16
"""16 bands of 4 rows: pairs of similarity 0.8 share a band with 99.98 %, of 0.3 with 12 %."""
SHINGLE_WORDS = 3
CONTAMINATION_WORDS = 13
"""The usual length of an n-gram that two texts do not share by chance (arXiv 2005.14165)."""
_PRIME = (1 << 31) - 1
"""Products of two residues fit into 64 bits."""
_RNG = np.random.default_rng(20250507)
_FACTORS = _RNG.integers(1, _PRIME, HASHES, dtype=np.uint64)
_SHIFTS = _RNG.integers(0, _PRIME, HASHES, dtype=np.uint64)


def words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ only in case, punctuation or spacing."""
    return blake3(" ".join(words(text)).encode()).digest(16)


def n_grams(parts: Sequence[str], size: int) -> set[int]:
    """Hashes of all runs of `size` words; a shorter text is one run."""
    size = min(size, len(parts)) or 1
    return {
        int.from_bytes(blake3(" ".join(parts[start : start + size]).encode()).digest(8), "big")
        for start in range(len(parts) - size + 1)
    }


def jaccard(first: set[int], second: set[int]) -> float:
    together = len(first | second)
    return len(first & second) / together if together else 1.0


def minhash(grams: set[int]) -> np.ndarray:
    """HASHES minima of a·x + b mod p; their share of agreement estimates the Jaccard similarity."""
    residues = np.array([gram % _PRIME for gram in grams], dtype=np.uint64)
    minima: np.ndarray = ((residues[:, None] * _FACTORS + _SHIFTS) % np.uint64(_PRIME)).min(axis=0)
    return minima


class NearDuplicates:
    """Remembers texts; says whether a new one resembles an earlier one by at least `threshold`. 1 asks for equal words only."""

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"a similarity of {threshold} is not between 0 and 1")
        self.threshold = threshold
        self._exact: set[bytes] = set()
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._grams: list[set[int]] = []

    def seen(self, text: str) -> bool:
        """True if it repeats an earlier text; otherwise it is remembered."""
        key = fingerprint(text)
        if key in self._exact:
            return True
        if self.threshold < 1 and self._resembles(text):
            return True
        self._exact.add(key)
        return False

    def _resembles(self, text: str) -> bool:
        grams = n_grams(words(text), SHINGLE_WORDS)
        if not grams:
            return False
        rows = minhash(grams).reshape(BANDS, -1)
        keys = [(band, row.tobytes()) for band, row in enumerate(rows)]
        candidates = {index for key in keys for index in self._bands.get(key, ())}
        if any(jaccard(grams, self._grams[index]) >= self.threshold for index in candidates):
            return True
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._grams))
        self._grams.append(grams)
        return False


class Contamination:
    """Texts that must stay unseen; a text that shares an n-gram with one of them, or equals a shorter one, is contaminated."""

    def __init__(self, texts: Iterable[str], size: int = CONTAMINATION_WORDS) -> None:
        self.size = size
        self._grams: set[int] = set()
        self._short: dict[int, set[int]] = {}
        for text in texts:
            parts = words(text)
            if len(parts) >= size:
                self._grams |= n_grams(parts, size)
            elif parts:
                self._short.setdefault(len(parts), set()).update(n_grams(parts, len(parts)))

    def touches(self, text: str) -> bool:
        parts = words(text)
        if len(parts) >= self.size and n_grams(parts, self.size) & self._grams:
            return True
        # A short problem leaks when it appears whole inside a longer text.
        return any(len(parts) >= size and n_grams(parts, size) & grams for size, grams in self._short.items())
