"""Math tasks end to end, and the rules of equality on a set of labelled pairs and on generated ones (test_math_properties.py)."""

import json
from pathlib import Path

import pytest

from shoal.tasks import Task, score
from shoal.tasks.verifiers.math.equality import is_equal
from shoal.tasks.verifiers.math.expressions import TooCostlyError
from shoal.tasks.verifiers.math.notation import tidy

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data" / "math_pairs.jsonl").read_text().splitlines()]
KINDS = sorted({pair["kind"] for pair in PAIRS})


def scored(truth: object, answer: str) -> tuple[float, bool]:
    task = Task(
        problem_id="p", source="t", task_type="verifiable_math", prompt="?", verification_info={"ground_truth": truth}
    )
    found = score(task, f"hm</think>So {answer}")
    assert not found.exact
    return found.reward, found.limited


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_answer_of_the_labelled_pairs_is_paid(kind: str) -> None:
    wrong = [pair for pair in PAIRS if pair["kind"] == kind and not pair["right"]]
    assert len(wrong) > 8
    assert [(pair["truth"], pair["answer"]) for pair in wrong if is_equal(pair["truth"], pair["answer"])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_right_answer_of_the_labelled_pairs_is_paid_but_for_the_listed_ones(kind: str) -> None:
    right = [pair for pair in PAIRS if pair["kind"] == kind and pair["right"]]
    assert len(right) > 8
    refused = [pair["answer"] for pair in right if not is_equal(pair["truth"], pair["answer"])]
    assert refused == [pair["answer"] for pair in right if pair.get("refused")]


def test_the_labelled_pairs_are_many_and_few_right_ones_are_refused() -> None:
    right = [pair for pair in PAIRS if pair["right"]]
    assert len(PAIRS) >= 2400
    assert len(KINDS) == 17
    assert len({(pair["truth"], pair["answer"]) for pair in PAIRS}) == len(PAIRS)
    assert sum(bool(pair.get("refused")) for pair in PAIRS) <= 0.02 * len(right)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", "\\boxed{42}"),
        (42, "\\boxed{42.0}"),
        (0.5, "\\boxed{\\frac12}"),
        ("42", "first \\boxed{42.0}, again \\boxed{ 42 }."),
        ("42", "the final answer is 42."),
        ("42", "The answer is found by adding. The answer is 42."),
        ("42", "#### 42"),
        ("42", "\\boxed 42"),
        ("5", "\\boxed 5."),
        ("5", "\\boxed5"),
        ("-5", "\\boxed -5"),
        ("\\frac12", "\\boxed \\frac{1}{2}"),
        ("\\pi", "\\boxed\\pi"),
        ("(1,2)", "\\boxed(1,2)"),
        ("42", "\\fbox{42}"),
        ("42", "\\boxed {42}"),
        ("42", "Put it into \\boxed{}: \\boxed{42}"),
        ("42", "the \\boxed format: \\boxed{42}"),
        ("42", "\\boxed{42} and a box that never \\boxed{closes"),
        ("\\{1,2\\}", "\\boxed{\\{1,2\\}}"),
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\frac{\\sqrt{3}}{2}}"),
        ("1,000,000", "\\boxed{1000000}"),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{1}{2}}"),
        ("$(1, 2)$", "\\boxed{\\left(1,2\\right)}"),
        ("\\boxed{7}", "\\boxed{7}"),
        ("7", "\\boxed{\\boxed{7}}"),
        ("7", "$$\\boxed{7}$$"),
    ],
)
def test_the_answer_is_found_where_it_is_written(truth: object, answer: str) -> None:
    assert scored(truth, answer) == (1.0, False)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("x^2+2x+1", "\\boxed{(x+1)^2}"),
        ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
        ("10", "\\boxed{10\\text{ cm}}"),
    ],
)
def test_equal_mathematics_in_other_words_is_right(truth: str, answer: str) -> None:
    assert scored(truth, answer) == (1.0, False)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", "\\boxed{43}"),
        ("42", "42"),
        ("(1,2)", "\\boxed{(2,1)}"),
        ("42", "\\boxed{42"),
        ("7", "\\boxed{" + "9" * 2000 + "}"),
        ("42", "\\boxed{}"),
        ("5", "\\boxed 57"),
    ],
)
def test_wrong_absent_and_endless_answers_earn_nothing(truth: str, answer: str) -> None:
    assert scored(truth, answer)[0] == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "first \\boxed{41}, then \\boxed{42}.",
        "\\boxed{42} or \\boxed{43}",
        "\\boxed{43} or \\boxed{42}",
        "\\boxed{42 or 43}",
        "\\boxed{42, 43}",
        "\\boxed{42 \\boxed{43}}",
        "\\boxed{42}, \\boxed 43",
        "\\boxed{42 (or maybe 43)}",
        "\\boxed{\\pm 42}",
        "\\boxed{42?}",
        "the answer is 41. The answer is 42",
        "Answer: 43\nAnswer: 42",
        "the answer is 42 or 43",
        "the answer is 42, or maybe 43",
        "".join(f"\\boxed{{{number}}}" for number in range(1000)),
    ],
)
def test_hedged_multiple_and_contradictory_answers_earn_nothing(answer: str) -> None:
    assert scored("42", answer) == (0.0, False)


HEDGES = [
    "{} or 7919", "7919 or {}", "{}, 7919", "{} and 7919", "{}?", "{} maybe", "not {}", "either {} or 7919", "about {}", "{}; 7919",
    "{} \\to 7919", "{} \\text{{ or }} 7919", "{} (or 7919)", "\\text{{probably }}{}", "{} \\ne 7919", "{} < 7919", "{}:7919:1",
]  # fmt: skip


@pytest.mark.parametrize("hedge", HEDGES)
def test_a_hedge_around_any_ground_truth_earns_nothing(hedge: str) -> None:
    truths = sorted({pair["truth"] for pair in PAIRS})
    assert [truth for truth in truths if is_equal(truth, hedge.format(truth))] == []


HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9",
    "\\sqrt" * 150 + "2",
    "\\sin" * 150 + " x",
    "(" * 450 + "1" + ")" * 450,
    "{" * 450 + "1" + "}" * 450,
    "\\frac{1}{1+" * 60 + "1" + "}" * 60,
    "+".join(["7^{7000}"] * 60),
    "+".join(["999!"] * 80),
    "\\binom{1000}{500}" * 20,
    "+".join(["\\sin(x^{1/3})"] * 60),
    "+".join(["e^{x\\pi}"] * 60),
    "*".join(["x"] * 190),
    "/".join(["x"] * 190),
    ",".join(f"\\sin {number}" for number in range(40)),
    "[1,2]" + "\\cup[1,2]" * 60,
    "\\text{" * 150 + "a" + "}" * 150,
    "1e999999",
    "|" * 900,
    "-" * 900,
    "\\" * 999,
    "2" + "^2" * 300,
    "__import__('os').system('id')",
    "\x00\ud7ff\u202e½⁵₅",
]


@pytest.mark.parametrize("answer", HOSTILE)
@pytest.mark.parametrize("truth", ["7", "x^2+1", "\\sin(x)", "1,2,3", "5 cm", "B"])
def test_no_answer_costs_more_than_its_operations(truth: str, answer: str) -> None:
    """Costs are counted, so this ends on every machine at the same place; nothing else is ever raised."""
    assert scored(truth, f"\\boxed{{{answer}}}")[0] == 0.0


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_ground_truth_is_as_cheap(answer: str) -> None:
    assert scored(answer[:900], "\\boxed{12345}")[0] == 0.0


def test_what_takes_too_many_operations_is_named() -> None:
    terms = [f"{number}\\sin x^{{\\pi}}" for number in range(2, 42)]
    with pytest.raises(TooCostlyError):
        is_equal("+".join(terms), "+".join(reversed(terms)))
    assert scored("+".join(terms), f"\\boxed{{{'+'.join(reversed(terms))}}}") == (0.0, False)


def test_ornaments_do_not_matter() -> None:
    assert tidy("$\\left( 1{,}000 \\right)$") == "( 1000 )"
    assert tidy("$$\\dfrac{1}{2}.$$") == tidy("½") == "\\frac {1}{2}"


def test_large_unions_of_irrational_intervals_are_compared_within_the_operations_of_one_answer() -> None:
    intervals = [rf"(\sqrt{{{2 * n}}},\sqrt{{{2 * n + 1}}})" for n in range(1, 30)]
    assert is_equal(r"\cup".join(intervals), r"\cup".join(reversed(intervals)))
    assert not is_equal(r"\cup".join(intervals), r"\cup".join(intervals[1:]))
