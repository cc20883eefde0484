"""Two files of one slot are the same work if their samples are, up to rounding."""

import pytest

from shoal.coordinator.rules.duplicates import Content, agree, samples_differing


def content(*groups: str, flips_allowed: int = 0) -> Content:
    """One letter for the tokens of each sample, a blank for one without a digest."""
    letters = {(group, place): letter for group, row in enumerate(groups) for place, letter in enumerate(row)}
    return Content({place: letter.strip() * 16 for place, letter in letters.items()}, flips_allowed)


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (("abc", "def"), 0),
        (("abc", "de0"), 1),
        (("bac", "def"), 2),
        (("def", "abc"), 6),
        (("abc",), 3),
        (("abcd", "def"), 1),
        (("abc", "def", "abc"), 3),
        (("abc", "de "), 1),
        ((), 6),
    ],
)
def test_samples_are_compared_place_by_place(other: tuple[str, ...], differing: int) -> None:
    ours, theirs = content("abc", "def"), content(*other)
    assert samples_differing(ours, theirs) == samples_differing(theirs, ours) == differing
    assert agree(ours, theirs) == (differing == 0)


def test_a_file_whose_samples_have_no_digests_agrees_with_none() -> None:
    bare = content("   ", "   ", flips_allowed=5)
    assert samples_differing(bare, bare) == 6
    assert not agree(bare, bare)


def test_both_verdicts_must_allow_what_rounding_explains() -> None:
    ours = content("abc", flips_allowed=1)
    assert agree(ours, content("ab0", flips_allowed=1))
    assert not agree(ours, content("a00", flips_allowed=9))
    assert not agree(ours, content("ab0", flips_allowed=0))
