"""The ledger of a run: the chain of entries, the secrets that it commits to, and what anyone can check of it."""

from shoal.coordinator.ledger.chain import (
    GENESIS,
    Entry,
    Extent,
    LedgerError,
    LedgerReader,
    append,
    balances,
    check_secrets,
    entry_hash,
    hash_at,
    head,
    line_of,
    page,
    seal,
    verify_export,
    whole,
)

__all__ = [
    "GENESIS",
    "Entry",
    "Extent",
    "LedgerError",
    "LedgerReader",
    "append",
    "balances",
    "check_secrets",
    "entry_hash",
    "hash_at",
    "head",
    "line_of",
    "page",
    "seal",
    "verify_export",
    "whole",
]
