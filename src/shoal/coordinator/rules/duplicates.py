"""Whether two files of one slot hold the same samples. Pure.

The same slot, version and numerics class give the same tokens up to rare rounding flips. A flip changes the rest of its sample, so
samples are counted, not tokens. The validator says how many may differ; a sample without a digest counts as different.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[int, int]
"""Group and sample."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a verdict says about the samples of a file."""

    samples: Mapping[Place, str]
    """Digests of their tokens, empty where there is none."""
    flips_allowed: int


def agree(left: Content, right: Content) -> bool:
    """Whether rounding explains all that is different."""
    return samples_differing(left, right) <= min(left.flips_allowed, right.flips_allowed)


def samples_differing(left: Content, right: Content) -> int:
    return sum(_differ(left.samples.get(place), right.samples.get(place)) for place in {*left.samples, *right.samples})


def _differ(left: str | None, right: str | None) -> bool:
    return not left or left != right
