import pytest

from shoal.observe.words import count, duration, plural, printable


def test_control_characters_cannot_reach_a_terminal() -> None:
    assert printable("evil\x1b[2J\x07\nname") == "evil\ufffd[2J\ufffd name"


def test_long_text_is_cut_to_the_limit() -> None:
    assert printable("x" * 50, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-3, "0:00"), (0.4, "0:00"), (65, "1:05"), (3599.7, "1:00:00"), (7265, "2:01:05")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_counts_and_plurals() -> None:
    assert [count(0), count(131_234), count(1_240.4)] == ["0", "131k", "1.2k"]
    assert [plural(1, "step"), plural(2, "step")] == ["1 step", "2 steps"]
