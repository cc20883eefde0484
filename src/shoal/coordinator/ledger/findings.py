"""What a check of a ledger found: one sentence about one entry."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Body = Mapping[str, Any]
"""The facts of an entry."""


class Finding(NamedTuple):
    entry: int
    """Its number; the first one is 0."""
    text: str
