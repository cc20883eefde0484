"""Which tokens of a completion the policy sampled, and which an environment gave.

A completion is a row of segments, alternately sampled and given, the first and the last one sampled. Only their lengths are
stored; masks, turns and counts are derived here and never sent. A plain completion is the case of one segment.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

Value = TypeVar("Value")


def segment_complaint(lengths: Sequence[int], tokens: int) -> str:
    """Why these cannot be the lengths of the segments of that number of output tokens; empty if they can."""
    if len(lengths) % 2 == 0:
        return f"has {len(lengths)} segments; the first and the last one are sampled, so their number is odd"
    if min(lengths) < 1:
        return f"has a segment of {min(lengths)} tokens"
    if sum(lengths) != tokens:
        return f"has segments of {sum(lengths)} tokens for {tokens} tokens"
    return ""


def sampled_count(lengths: Sequence[int]) -> int:
    return sum(lengths[::2])


def turn_count(lengths: Sequence[int]) -> int:
    """Segments that the policy sampled."""
    return (len(lengths) + 1) // 2


def split_segments(values: Sequence[Value], lengths: Sequence[int]) -> list[Sequence[Value]]:
    """One part per segment, in order."""
    return [values[start:end] for start, end in pairwise([0, *accumulate(lengths)])]


def sampled_places(lengths: Sequence[int]) -> list[int]:
    """Where in the output the sampled tokens are."""
    spans = list(pairwise([0, *accumulate(lengths)]))[::2]
    return [place for start, end in spans for place in range(start, end)]


def sampled_values(values: Sequence[Value], lengths: Sequence[int]) -> list[Value]:
    """Of values for every output token, those of sampled ones."""
    return [value for part in split_segments(values, lengths)[::2] for value in part]
