"""Sequences that share a forward pass: neighbours in length, padded to the longest of them. Pure integers."""

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def length_batches(
    lengths: Mapping[Key, int],
    *,
    token_limit: float = math.inf,
    padding_limit: float = math.inf,
    shortest_share: float = 0.0,
) -> Iterator[list[Key]]:
    """Keys of similar length, the longest first; equal lengths keep their order.

    A batch has one member, or its padded size is within `token_limit`, its padding within `padding_limit`, and its shortest
    member has at least `shortest_share` of the longest.
    """
    batch: list[Key] = []
    tokens = 0
    for key in sorted(lengths, key=lengths.__getitem__, reverse=True):
        longest = lengths[batch[0]] if batch else 0
        padded = longest * (len(batch) + 1)
        too_much = padded > token_limit or padded - tokens - lengths[key] > padding_limit
        if batch and (too_much or lengths[key] < shortest_share * longest):
            yield batch
            batch, tokens = [], 0
        batch.append(key)
        tokens += lengths[key]
    if batch:
        yield batch
