"""Whether more bytes of an upload may be stored. Pure."""

STRANGERS_SHARE = 0.5
"""Of the space that is left, for what keys without accepted work are sending: they cannot keep the others out."""


def may_store(free_bytes: int, min_free_bytes: int, strangers_bytes: int, *, is_stranger: bool) -> bool:
    """`free_bytes` is left after everything that has arrived so far; `strangers_bytes` of that came from strangers and is not
    complete."""
    spare_bytes = free_bytes - min_free_bytes
    if spare_bytes < 0:
        return False
    return not is_stranger or strangers_bytes <= STRANGERS_SHARE * (spare_bytes + strangers_bytes)
