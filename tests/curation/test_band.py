import pytest

from shoal.curation import Band, solve_rates
from shoal.curation.band import TOO_EASY, TOO_HARD, histogram
from support.answers import answer


@pytest.mark.parametrize(("solved", "reason"), [(0, TOO_HARD), (1, ""), (2, ""), (4, ""), (5, TOO_EASY), (8, TOO_EASY)])
def test_the_default_band_keeps_one_to_four_of_eight(solved: int, reason: str) -> None:
    assert Band().refusal(solved / 8) == reason


def test_rates_count_solved_answers_only() -> None:
    answers = [answer("a", 0, 1.0), answer("a", 1, 0.99), answer("b", 0, 0.0), answer("a", 2, 1.0)]
    assert solve_rates(answers) == {"a": pytest.approx(2 / 3), "b": 0.0}


def test_the_histogram_has_every_count() -> None:
    assert histogram([0.0, 0.5, 0.5, 1.0], 2) == {"0/2": 1, "1/2": 2, "2/2": 1}
