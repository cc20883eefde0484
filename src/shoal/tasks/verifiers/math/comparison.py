"""Whether an answer is the ground truth, by the kind of the ground truth.

What the two have to share is decided by rules, not by a search for numbers: a list needs all items, a quantity its unit,
an equation its variables, an interval its ends.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from shoal.tasks.verifiers.math.everyday import is_time_of_day
from shoal.tasks.verifiers.math.expressions import Evaluator, Node, NoValueError, number
from shoal.tasks.verifiers.math.forms import (
    is_clock,
    is_literal,
    is_rounded,
    is_spelled,
    is_unevaluated,
    is_unsolved,
    names_a_value,
)
from shoal.tasks.verifiers.math.kinds import (
    Based,
    Clock,
    Expression,
    Items,
    Labelled,
    Matrix,
    Member,
    Percent,
    Quantity,
    Ratio,
    Relation,
    Words,
)
from shoal.tasks.verifiers.math.sets import is_set_notation, same_set, to_set

_FINEST = Fraction(1, 10**60)
_SUBSCRIPT = re.compile(r"_\{?[1-9]\}?\Z")
_DEGREE = (("degree", 1),)


class Comparison:
    """One comparison of an answer with a ground truth, within one budget of operations."""

    def __init__(self) -> None:
        self._evaluator = Evaluator()

    def same(self, truth: Any, answer: Any) -> bool:
        self._evaluator.spend(1)
        if truth == answer:
            return True
        if isinstance(answer, Labelled) and answer.approximate and not is_rounded(truth):
            return False
        if is_unsolved(answer) and not is_unsolved(truth):
            return False
        truth, answer = _spread(truth, answer), _spread(answer, truth)
        if isinstance(truth, Labelled):
            return self._labelled(truth, answer)
        if is_set_notation(truth) or is_set_notation(answer):
            return self._as_sets(truth, answer)
        if isinstance(truth, Member):
            if isinstance(answer, Member):
                return truth.symbol == answer.symbol and self.same(truth.members, answer.members)
            return self.same(truth.members, answer)
        if isinstance(truth, Relation):
            return self._equation(truth, answer)
        if isinstance(answer, Labelled | Member | Relation):
            return self._stated(truth, answer)
        rule = _RULES.get(type(truth))
        return rule is not None and bool(rule(self, truth, answer))

    def _stated(self, truth: Any, answer: Labelled | Member | Relation) -> bool:
        """x = 5, x ∈ {…} and x = 10/2 = 5 state a value; each side has to be it, and what follows ≈ has to round it."""
        if isinstance(answer, Labelled):
            return self.same(truth, answer.answer)
        if isinstance(answer, Member):
            return self.same(truth, answer.members)
        sides, operators = answer.sides, answer.operators
        if operators[-1] == "~":
            if not self._rounds(sides[-2], sides[-1]):
                return False
            sides, operators = sides[:-1], operators[:-1]
        if not {*operators} <= {"="}:
            return False
        return self.same(truth, sides[-1]) and all(self._equal_sides(sides[-1], side) for side in sides[:-1])

    def _rounds(self, exact: Any, rounded: Any) -> bool:
        """Whether a decimal number is the other one rounded, or cut off, at its last place."""
        if not isinstance(exact, Expression) or not isinstance(rounded, Expression) or rounded.node.op != "number":
            return False
        value, unit = rounded.node.value, Fraction(1)
        while (value / unit).denominator > 1 and unit > _FINEST:
            unit /= 10
        towards, away = (unit / 2, unit) if value >= 0 else (unit, unit / 2)
        low, high = number(value - towards), number(value + away)
        try:
            below, middle, above = (self._evaluator.value(node, real=True) for node in (low, exact.node, high))
            return self._evaluator.less(below, middle) and self._evaluator.less(middle, above)
        except NoValueError:
            return False

    def _equal_sides(self, one: Any, other: Any) -> bool:
        return isinstance(one, Expression) and isinstance(other, Expression) and self._equal(one.node, other.node)

    def _labelled(self, truth: Labelled, answer: Any) -> bool:
        if isinstance(answer, Labelled) and answer.label == truth.label:
            return self.same(truth.answer, answer.answer)
        if isinstance(answer, Labelled | Relation):
            return self._equation(truth, answer)
        return names_a_value(truth) and self.same(truth.answer, answer)

    def _equation(self, truth: Labelled | Relation, answer: Any) -> bool:
        """Two equations are equal if one is the other times a constant."""
        one, other = _difference(truth), _difference(answer)
        if one is None or other is None or not one.symbols or one.symbols != other.symbols:
            return False
        return self._evaluator.proportional(one, other, positive=False)

    def _as_sets(self, truth: Any, answer: Any) -> bool:
        if isinstance(answer, Labelled):
            answer = answer.answer
        one, other = to_set(truth, self._evaluator), to_set(answer, self._evaluator)
        if one is not None and other is not None:
            return same_set(one, other, self._evaluator)
        if isinstance(truth, Relation) and isinstance(answer, Relation):
            return self._inequality(truth, answer)
        if isinstance(truth, Items) and isinstance(answer, Items):
            return self._items(truth, answer)
        return False

    def _inequality(self, truth: Relation, answer: Relation) -> bool:
        """In several variables or not linear: the same up to a factor, which turns the sign if it is negative."""
        one, other = _ascending(truth), _ascending(answer)
        if (
            one is None
            or other is None
            or one[0] != other[0]
            or one[1].symbols != other[1].symbols
            or not one[1].symbols
        ):
            return False
        return self._evaluator.proportional(one[1], other[1], positive=one[0] != "!=")

    def _expression(self, truth: Expression, answer: Any) -> bool:
        if isinstance(answer, Expression):
            return not (is_literal(truth.node) and is_unevaluated(answer.node)) and self._equal(truth.node, answer.node)
        if isinstance(answer, Quantity):
            return self._measured(truth, answer)
        if isinstance(answer, Percent):
            return self._equal(truth.node, _hundredth(answer.node))
        if isinstance(answer, Ratio):
            return (
                len(answer.parts) == 2 and not answer.is_time and self._equal(truth.node, Node("divide", answer.parts))
            )
        return (
            isinstance(answer, Items)
            and answer.shape == "set"
            and len(answer.items) == 1
            and self.same(truth, answer.items[0])
        )

    def _measured(self, truth: Expression, answer: Quantity) -> bool:
        """A unit that the ground truth does not have says nothing else, but for an angle: 30° is π/6."""
        if answer.unit.bases == _DEGREE and self._equal(truth.node, Node("degree", (answer.node,))):
            return True
        return not answer.node.symbols and self._expression(truth, Expression(answer.node))

    def _quantity(self, truth: Quantity, answer: Any) -> bool:
        if isinstance(answer, Quantity):
            (bases, one), (others, other) = _in_base_units(truth), _in_base_units(answer)
            return bases == others and self._equal(one, other)
        if not isinstance(answer, Expression) or not truth.sure or answer.node.symbols:
            return False
        if truth.unit.bases == _DEGREE and self._equal(Node("degree", (truth.node,)), answer.node):
            return True
        return self._expression(Expression(truth.node), answer)

    def _percent(self, truth: Percent, answer: Any) -> bool:
        if isinstance(answer, Percent):
            return self._expression(Expression(truth.node), Expression(answer.node))
        if not isinstance(answer, Expression):
            return False
        # Without its sign a number above 1 is taken for the percentage; a smaller one could be the value of another.
        written = self._expression(Expression(truth.node), answer) and self._evaluator.less(
            Fraction(1), self._evaluator.value(truth.node)
        )
        return written or self._equal(_hundredth(truth.node), answer.node)

    def _ratio(self, truth: Ratio, answer: Any) -> bool:
        if isinstance(answer, Clock):
            return is_time_of_day(truth, answer)
        if isinstance(answer, Expression):
            return (
                len(truth.parts) == 2 and not is_clock(truth) and self._equal(Node("divide", truth.parts), answer.node)
            )
        if not isinstance(answer, Ratio) or len(answer.parts) != len(truth.parts):
            return False
        if is_clock(truth) or answer.is_time:
            return truth.is_time == answer.is_time and truth.parts == answer.parts
        pairs = zip(truth.parts, answer.parts, strict=True)
        return all(
            self._equal(Node("multiply", (one, answer.parts[0])), Node("multiply", (other, truth.parts[0])))
            for one, other in pairs
        )

    def _clock(self, truth: Clock, answer: Any) -> bool:
        return isinstance(answer, Ratio) and is_time_of_day(answer, truth)

    def _items(self, truth: Items, answer: Any) -> bool:
        if isinstance(answer, Words):
            return truth.shape == "set" and not truth.items and answer.text == "no solution"
        if not isinstance(answer, Items) or len(answer.items) != len(truth.items):
            return len(getattr(truth, "items", ())) == 1 and truth.shape == "set" and self.same(truth.items[0], answer)
        if answer.connective == "or" and truth.connective != "or" and any(map(is_spelled, truth.items)):
            return False
        if {truth.shape, answer.shape} <= {"list", "set"}:
            (name, truths), (other, answers) = _unnamed(truth.items, answer.items), _unnamed(answer.items, truth.items)
            return (not name or not other or name == other) and self._unordered(truths, list(answers))
        return _brackets(truth) == _brackets(answer) and all(map(self._same_part, truth.items, answer.items))

    def _unordered(self, truths: Sequence[Any], answers: list[Any]) -> bool:
        for truth in truths:
            place = next((place for place, answer in enumerate(answers) if self._same_item(truth, answer)), None)
            if place is None:
                return False
            answers.pop(place)
        return True

    def _same_item(self, truth: Any, answer: Any) -> bool:
        """Names of items matter: x = 1, y = 2 is not 1, 2."""
        return isinstance(truth, Labelled) == isinstance(answer, Labelled) and self._same_part(truth, answer)

    def _same_part(self, truth: Any, answer: Any) -> bool:
        """Inside of something a set of one item is not the item: {1},{2} is not {1,2}."""
        return isinstance(truth, Items) == isinstance(answer, Items) and self.same(truth, answer)

    def _matrix(self, truth: Matrix, answer: Any) -> bool:
        rows = answer.rows if isinstance(answer, Matrix) else _nested_rows(answer)
        return list(map(len, rows)) == list(map(len, truth.rows)) and all(
            self.same(one, other)
            for row, others in zip(truth.rows, rows, strict=True)
            for one, other in zip(row, others, strict=True)
        )

    def _words(self, truth: Words, answer: Any) -> bool:
        return isinstance(answer, Items) and self._items(answer, truth)

    def _equal(self, one: Node, other: Node) -> bool:
        if one == other:
            return True
        if one.symbols != other.symbols:
            return False
        try:
            return self._evaluator.equal(one, other)
        except NoValueError:
            return False


_RULES: dict[type, Any] = {
    Expression: Comparison._expression,
    Quantity: Comparison._quantity,
    Percent: Comparison._percent,
    Ratio: Comparison._ratio,
    Clock: Comparison._clock,
    Items: Comparison._items,
    Matrix: Comparison._matrix,
    Words: Comparison._words,
    Based: lambda comparison, truth, answer: False,
}


def _hundredth(node: Node) -> Node:
    return Node("divide", (node, number(100)))


def _in_base_units(quantity: Quantity) -> tuple[object, Node]:
    if quantity.unit.bases == _DEGREE:
        return (("radian", 1),), Node("degree", (quantity.node,))
    return quantity.unit.bases, Node("multiply", (quantity.node, number(quantity.unit.factor)))


def _difference(kind: Any) -> Node | None:
    """left - right of an equation."""
    if isinstance(kind, Labelled):
        sides: tuple[Any, ...] = (Expression(kind.symbol) if kind.symbol is not None else None, kind.answer)
    elif isinstance(kind, Relation) and kind.operators == ("=",):
        sides = kind.sides
    else:
        return None
    if not all(isinstance(side, Expression) for side in sides):
        return None
    return Node("add", (sides[0].node, Node("negate", (sides[1].node,))))


def _ascending(kind: Relation) -> tuple[str, Node] | None:
    """The operator turned to < or ≤, and the difference of its sides."""
    if len(kind.operators) != 1 or not all(isinstance(side, Expression) for side in kind.sides):
        return None
    (operator,), (left, right) = kind.operators, kind.sides
    if ">" in operator:
        operator, left, right = operator.replace(">", "<"), right, left
    return operator, Node("add", (left.node, Node("negate", (right.node,))))


def _unnamed(items: Sequence[Any], others: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """x = 4, x = 5 and x = 4, 5 are values of one variable, and x_1 = 4, x_2 = 5 beside 4, 5; x = 4, y = 5 are not."""
    labels = {item.label for item in items if isinstance(item, Labelled)}
    if len(labels) == len(items) and not any(isinstance(other, Labelled) for other in others):
        labels = {_SUBSCRIPT.sub("", label) for label in labels}
    if len(labels) != 1 or not isinstance(items[0], Labelled):
        return "", items
    return labels.pop(), [item.answer if isinstance(item, Labelled) else item for item in items]


def _spread(kind: Any, other: Any) -> Any:
    """As the other answer is written: (x,y) = (1,2) as x = 1, y = 2, and a vector ⟨1,2⟩ as a column."""
    if isinstance(kind, Items) and kind.shape == "\\langle\\rangle" and isinstance(other, Matrix):
        return Matrix(tuple((item,) for item in kind.items))
    if (
        not isinstance(kind, Labelled)
        or not isinstance(kind.answer, Items)
        or not isinstance(other, Items)
        or other.shape != "list"
    ):
        return kind
    names = kind.label.strip("()").split(",")
    if len(names) != len(kind.answer.items) or kind.answer.shape != "()":
        return kind
    return Items("list", tuple(Labelled(*pair, None) for pair in zip(names, kind.answer.items, strict=True)))


def _brackets(items: Items) -> str:
    """Vectors are tuples; of two items, [ ] is another thing than ( )."""
    if items.shape == "\\langle\\rangle" or (items.shape == "[]" and len(items.items) != 2):
        return "()"
    return items.shape


def _nested_rows(answer: Any) -> tuple[tuple[Any, ...], ...]:
    if (
        isinstance(answer, Items)
        and answer.shape == "[]"
        and all(isinstance(item, Items) and item.shape == "[]" for item in answer.items)
    ):
        return tuple(item.items for item in answer.items)
    return ()
