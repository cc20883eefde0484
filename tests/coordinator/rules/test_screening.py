import pytest

from shoal.coordinator.rules.screening import withheld


@pytest.mark.parametrize(
    ("value", "held"),
    [(0.0, False), (30.0, False), (-30.0, False), (-30.1, True), (30.1, True), (float("nan"), True), (1e9, True)],
)
def test_a_statistic_beyond_the_limit_holds_a_group_back(value: float, held: bool) -> None:
    assert withheld({"group": value}, (), 30.0) == ({"group"} if held else set())


def test_audited_groups_are_never_held_back() -> None:
    assert withheld({"one": -99.0, "two": -99.0}, {"one"}, 30.0) == {"two"}
