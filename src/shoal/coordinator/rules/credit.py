"""What verified tokens earn: a slot is paid once, part of it is held as a stake.

Pure: the coordinator books by these rules, and `ledger verify` repeats them.
"""


def split_credit(held: int, earned: int, stake_tokens: int) -> tuple[int, int]:
    """Change of held and of released credit when `earned` tokens were verified: what exceeds the stake is released."""
    release = max(0, held + earned - stake_tokens)
    return earned - release, release


def share(paid_tokens: int, other_files: int, held: int) -> int:
    """What a further file in time takes over from the key whose file counts: half of what the slot paid, less for each one more.

    Only what is still held can be taken back.
    """
    return min(paid_tokens // (2 * other_files), held)
