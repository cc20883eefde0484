from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.charts import BLANK, bar, curve, value_range

points = st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=12)


@given(points, st.integers(1, 60), st.integers(1, 12), st.floats(0, 100), st.floats(-5, 5))
def test_curve_fills_exactly_its_size(
    points: list[tuple[float, float]], columns: int, rows: int, x_high: float, y_low: float
) -> None:
    lines = curve(points, columns, rows, x_range=(0, x_high), y_range=(y_low, y_low + 1))
    assert [len(line) for line in lines] == [columns] * rows
    assert all(BLANK <= ord(character) <= BLANK + 0xFF for line in lines for character in line)


def test_curve_rises_from_lower_left_to_upper_right() -> None:
    assert curve([(0, 0), (1, 1)], 2, 1, x_range=(0, 1), y_range=(0, 1)) == ["⡠⠊"]


def test_curve_without_points_is_blank() -> None:
    assert curve([], 3, 1, x_range=(0, 1), y_range=(0, 1)) == [chr(BLANK) * 3]


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 40))
def test_bar_never_passes_its_columns(value: float, largest: float, columns: int) -> None:
    drawn = bar(value, largest, columns)
    assert len(drawn) <= columns
    assert bool(drawn) == (value > 0 and largest > 0)


def test_range_widens_but_never_narrows() -> None:
    assert value_range([], 0, 1) == (0, 1)
    assert value_range([-0.2, 0.4], 0, 1) == (-0.2, 1)
