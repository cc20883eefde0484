import json

from shoal.evaluation import (
    compare_answers,
    comparison_json,
    comparison_table,
    metrics_by_category,
    metrics_json,
    metrics_table,
)
from shoal.evaluation.tables import histogram_lines, markdown_table
from support.answers import answer

ANSWERS = [
    answer("a", 0, 1.0, category="x|y"),
    answer("a", 1, 0.0, category="x|y"),
    answer("b", 0, 1.0),
    answer("b", 1, 1.0),
]


def test_the_table_names_the_metrics_by_their_k() -> None:
    lines = metrics_table(metrics_by_category(ANSWERS)).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")][1:6] == ["category", "problems", "avg@2", "pass@1", "pass@2"]
    assert "0.750 [" in lines[2]
    assert "x\\|y" in lines[4]


def test_every_line_of_a_table_is_as_wide_as_the_others() -> None:
    lines = markdown_table(["a", "long name"], [["something", "1"], ["x", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_comparison_names_both_policies() -> None:
    text = comparison_table(compare_answers(ANSWERS, ANSWERS), "old", "new")
    assert "| old " in text
    assert "| new " in text
    assert "+0.000 [+0.000, +0.000]" in text


def test_json_holds_the_same_metrics() -> None:
    metrics = json.loads(json.dumps(metrics_json(metrics_by_category(ANSWERS))))
    assert metrics[0]["avg"]["mean"] == 0.75
    assert metrics[0]["pass_at"]["2"]["mean"] == 1.0
    assert json.loads(json.dumps(comparison_json(compare_answers(ANSWERS, ANSWERS))))[0]["p_value"] == 1.0


def test_bars_are_as_long_as_their_counts() -> None:
    assert histogram_lines({"0/2": 2, "1/2": 4, "2/2": 0}, width=4) == ["0/2 ██ 2", "1/2 ████ 4", "2/2  0"]
