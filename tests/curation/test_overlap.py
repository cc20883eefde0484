"""What counts as the same text, and what is too close to an evaluation set."""

import random

import numpy as np
import pytest

from shoal.curation import Contamination, NearDuplicates
from shoal.curation.overlap import jaccard, minhash, n_grams, words

PROOF = "Let n be an integer. Then n squared plus n is even because one of two neighbours is even and so their product is even."


def test_words_keep_numbers_and_signs_and_lose_dress() -> None:
    assert words("Compute  47+38-19.") == ["compute", "47", "+", "38", "-", "19"]
    assert words("COMPUTE 47 + 38 - 19!") == words("Compute 47+38-19.")
    assert words("ﬁnd x²") == words("find x2")


def test_minhash_estimates_the_similarity() -> None:
    rng = random.Random(0)
    errors = []
    for _ in range(100):
        first = {rng.getrandbits(64) for _ in range(60)}
        second = set(list(first)[:40]) | {rng.getrandbits(64) for _ in range(20)}
        errors.append((minhash(first) == minhash(second)).mean() - jaccard(first, second))
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.1


def test_equal_problems_in_other_dress_are_duplicates_and_other_numbers_are_not() -> None:
    seen = NearDuplicates(1.0)
    assert not seen.seen("Compute 47+38-19.")
    assert seen.seen("compute 47 + 38 - 19")
    assert not seen.seen("Compute 47+38-18.")


def test_near_duplicates_are_found_among_many_and_strangers_are_not() -> None:
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(400)]
    texts = [" ".join(rng.choices(vocabulary, k=80)) for _ in range(300)]
    seen = NearDuplicates(0.8)
    assert not any(seen.seen(text) for text in texts)
    changed = [" ".join(["changed", *text.split()[1:]]) for text in texts]
    assert all(seen.seen(text) for text in changed)


def test_what_hashes_alike_is_still_compared_truly() -> None:
    seen = NearDuplicates(0.9)
    words_of = [f"w{number}" for number in range(40)]
    assert not seen.seen(" ".join(words_of))
    assert not seen.seen(" ".join(words_of[:30] + [f"v{number}" for number in range(10)]))


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_a_similarity_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="not between"):
        NearDuplicates(threshold)


def test_a_shared_run_of_words_is_contamination_and_a_shared_topic_is_not() -> None:
    unseen = Contamination([PROOF])
    assert unseen.touches(f"Show the following. {PROOF.upper()} Explain.")
    assert unseen.touches(" ".join(PROOF.split()[:16]))
    assert not unseen.touches("Let n be an integer. Prove that n squared plus n is even.")
    assert not unseen.touches(" ".join(PROOF.split()[:12]))


def test_a_short_problem_leaks_when_it_appears_whole() -> None:
    unseen = Contamination(["Compute 47+38-19."])
    assert unseen.touches("compute 47 + 38 - 19")
    assert unseen.touches("Warm up first, then compute 47+38-19 slowly and write down the result in a box.")
    assert not unseen.touches("Compute 47+38-18.")
    assert not Contamination([]).touches(PROOF)


def test_a_text_shorter_than_the_run_is_one_run() -> None:
    assert len(n_grams(["a", "b"], 5)) == 1
    assert n_grams([], 3) == n_grams([], 3)
