"""Which key gets a late slot too. Pure.

The same slot, version and numerics class give the same tokens, so a second key can fill a slot whose first key is late. It is
drawn by a keyed hash, not by who asks first, and not announced. A key that was drawn but does not ask lets the next one have it.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from blake3 import blake3

LAST_RANK = 4
"""Keys behind it wait no longer, so idle keys delay a backup by a few polls at most."""


@dataclass(frozen=True, slots=True)
class LateSlot:
    """A slot without a file whose keys had their time."""

    step: int
    slot: int
    version: int
    attempts: int
    due_at: float


def may_take(late: LateSlot, key: str, others: Iterable[str], secret: bytes, now: float, poll_s: float) -> bool:
    """Whether it is this key's turn: one poll passes for each eligible key before it."""
    waited_s, slot = now - late.due_at, (late.step, late.slot, late.attempts)
    if waited_s >= LAST_RANK * poll_s:
        return True
    rank = bisect_left(_places(slot, tuple(others), secret), _place(slot, key, secret))
    return waited_s >= min(rank, LAST_RANK) * poll_s


# Every key that asks is compared with the same others.
@lru_cache(maxsize=1 << 10)
def _places(slot: tuple[int, int, int], keys: tuple[str, ...], secret: bytes) -> list[bytes]:
    return sorted(_place(slot, key, secret) for key in keys)


@lru_cache(maxsize=1 << 14)
def _place(slot: tuple[int, int, int], key: str, secret: bytes) -> bytes:
    step, number, attempts = slot
    return blake3(f"backup\n{step}\n{number}\n{attempts}\n{key}".encode(), key=secret).digest()
