"""When a worker is present, and which of two signed messages is newer. Pure."""

CLOCK_WINDOW_S = 300.0
"""Signed requests older or newer than this are refused; nonces are kept that long."""
Stamp = tuple[float, str]
"""Signed time and nonce of a request that costs no durable write."""


def is_newer(stamp: Stamp, newest: Stamp) -> bool:
    """Whether a message says something that was not heard before; a replay does not."""
    return stamp[0] > newest[0] or (stamp[0] == newest[0] and stamp[1] != newest[1])


def is_present(seen_at: float, now: float, gone_after_s: float) -> bool:
    return now - seen_at <= gone_after_s
