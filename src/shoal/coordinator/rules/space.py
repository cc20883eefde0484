"""Whether more bytes of an upload may be stored, and when refused files have to make room. Pure."""

STRANGERS_SHARE = 0.5
"""Of the space that is left, for what keys without accepted work send: they cannot keep the others out."""
REFUSED_SHARE = 0.25
"""Of the same space, for refused files that are kept as evidence: junk must not keep newcomers out either."""


def may_store(free_bytes: int, min_free_bytes: int, strangers_bytes: int, *, is_stranger: bool) -> bool:
    """`free_bytes` is left after everything that has arrived so far; `strangers_bytes` of that came from strangers and no verdict
    has accepted it."""
    spare_bytes = free_bytes - min_free_bytes
    if spare_bytes < 0:
        return False
    return not is_stranger or strangers_bytes <= STRANGERS_SHARE * (spare_bytes + strangers_bytes)


def refused_bytes_to_remove(free_bytes: int, min_free_bytes: int, refused_bytes: int) -> int:
    """How many bytes of refused files must go, so that the rest holds at most its share."""
    spare_bytes = max(0, free_bytes - min_free_bytes)
    return max(0, refused_bytes - int(REFUSED_SHARE * (spare_bytes + refused_bytes)))
