"""Sets of real numbers: intervals, unions, inequalities in one variable, finite sets.

Two sets are compared cell by cell: all their end points are sorted, and each point and each gap between two of them is in
both or in neither. So it does not matter how a set is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shoal.tasks.verifiers.math.expressions import Evaluator, Node, NoValueError, Value, number
from shoal.tasks.verifiers.math.kinds import Expression, Items, Joined, Labelled, Member, Reals, Relation

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
_PROBES = (Fraction(0), Fraction(1), Fraction(-7, 3), Fraction(29, 11))


@dataclass(frozen=True)
class Interval:
    """Without a bound where it is None."""

    low: Value | None
    high: Value | None
    low_closed: bool = False
    high_closed: bool = False


@dataclass(frozen=True)
class Combined:
    operator: str
    """∪, ∩ or ∖, in LaTeX."""
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class RealSet:
    members: Interval | Combined
    symbol: str = ""
    """The variable, where the set was written as a condition on one."""


def is_set_notation(kind: Any) -> bool:
    """Whether the answer can only be a set: an inequality, a union, an interval with a closed or infinite end."""
    if isinstance(kind, Relation):
        return not {"=", "~"} & {*kind.operators}
    if isinstance(kind, Items):
        if kind.shape == "list":
            return kind.connective in ("or", "and") and any(is_set_notation(item) for item in kind.items)
        return kind.shape in ("(]", "[)") or any(_infinite(item) for item in kind.items)
    return isinstance(kind, Joined | Reals) or (isinstance(kind, Member) and is_set_notation(kind.members))


def to_set(kind: Any, evaluator: Evaluator) -> RealSet | None:
    """The set that an answer names; None if it names none that can be computed."""
    try:
        return _Sets(evaluator).read(kind)
    except NoValueError:
        return None


def same_set(one: RealSet, other: RealSet, evaluator: Evaluator) -> bool:
    if one.symbol and other.symbol and one.symbol != other.symbol:
        return False
    ends: list[Value] = []
    for value in (*_ends(one.members), *_ends(other.members)):
        if not any(evaluator.same(value, known) for known in ends):
            ends.append(value)
    order = _Order(ends, evaluator)
    places = [Fraction(place, 2) for place in range(-1, 2 * len(ends))]
    return all(order.contains(one.members, place) == order.contains(other.members, place) for place in places)


def _ends(members: Interval | Combined) -> list[Value]:
    if isinstance(members, Interval):
        return [value for value in (members.low, members.high) if value is not None]
    return [value for part in members.parts for value in _ends(part)]


class _Order:
    """End points by rank; a gap lies half a rank from its neighbours."""

    def __init__(self, ends: Sequence[Value], evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._ranks = [(value, sum(evaluator.less(other, value) for other in ends)) for value in ends]
        self._found: dict[int, int] = {}

    def _rank(self, value: Value) -> int:
        """Looked up once per end of an interval: a comparison of irrational numbers takes time."""
        if id(value) not in self._found:
            self._found[id(value)] = next(rank for known, rank in self._ranks if self._evaluator.same(known, value))
        return self._found[id(value)]

    def contains(self, members: Interval | Combined, place: Fraction) -> bool:
        if isinstance(members, Combined):
            self._evaluator.spend(1)
            inside = [self.contains(part, place) for part in members.parts]
            if members.operator == "\\setminus":
                return inside[0] and not any(inside[1:])
            return any(inside) if members.operator == "\\cup" else all(inside)
        above = members.low is None or self._rank(members.low) < place
        below = members.high is None or place < self._rank(members.high)
        at_low = members.low is not None and members.low_closed and self._rank(members.low) == place
        at_high = members.high is not None and members.high_closed and self._rank(members.high) == place
        return (above or at_low) and (below or at_high)


class _Sets:
    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def read(self, kind: Any) -> RealSet | None:
        if isinstance(kind, Reals):
            return RealSet(Interval(None, None))
        if isinstance(kind, Member):
            members = self.read(kind.members)
            return members and RealSet(members.members, kind.symbol)
        if isinstance(kind, Joined):
            return self._joined(kind)
        if isinstance(kind, Items):
            return self._items(kind)
        if isinstance(kind, Relation):
            return self._relation(kind)
        if isinstance(kind, Labelled) and kind.symbol is not None and kind.symbol.op == "symbol":
            return self._relation(Relation((Expression(kind.symbol), kind.answer), ("=",)))
        return None

    def _joined(self, kind: Joined) -> RealSet | None:
        if len(set(kind.operators)) > 1:
            return None
        return self._combined(kind.operators[0], kind.parts)

    def _combined(self, operator: str, kinds: Sequence[Any]) -> RealSet | None:
        parts = [self.read(kind) for kind in kinds]
        found = [part for part in parts if part is not None]
        symbols = {part.symbol for part in found} - {""}
        if len(found) < len(parts) or len(symbols) > 1:
            return None
        return RealSet(Combined(operator, tuple(part.members for part in found)), symbols.pop() if symbols else "")

    def _items(self, kind: Items) -> RealSet | None:
        if kind.shape == "list":
            operator = {"or": "\\cup", "and": "\\cap"}.get(kind.connective)
            return self._combined(operator, kind.items) if operator else None
        if kind.shape == "set":
            return RealSet(Combined("\\cup", tuple(self._point(item) for item in kind.items)))
        if len(kind.items) != 2 or kind.shape not in ("()", "[]", "(]", "[)"):
            return None
        low, high = (None if _infinite(item) else self._number(item) for item in kind.items)
        signs = [_infinite(item) for item in kind.items]
        closed = (kind.shape[0] == "[", kind.shape[1] == "]")
        if (closed[0] and signs[0]) or (closed[1] and signs[1]):
            return None
        if (
            signs[0] > 0
            or signs[1] < 0
            or (low is not None and high is not None and not self._evaluator.less(low, high))
        ):
            return None
        return RealSet(Interval(low, high, *closed))

    def _point(self, item: Any) -> Interval:
        value = self._number(item)
        return Interval(value, value, True, True)

    def _number(self, item: Any) -> Value:
        if not isinstance(item, Expression):
            raise NoValueError
        return self._evaluator.value(item.node, real=True)

    def _relation(self, kind: Relation) -> RealSet | None:
        """A condition on one variable: linear in it, or on the absolute value or the square of such an expression."""
        if not all(isinstance(side, Expression) for side in kind.sides):
            return None
        symbols = frozenset[str]().union(*(side.node.symbols for side in kind.sides))
        if len(symbols) != 1:
            return None
        pairs = zip(kind.sides, kind.operators, kind.sides[1:], strict=False)
        (symbol,) = symbols
        parts = tuple(self._condition(left.node, operator, right.node, symbol) for left, operator, right in pairs)
        return RealSet(Combined("\\cap", parts), symbol)

    def _condition(self, left: Node, operator: str, right: Node, symbol: str) -> Interval | Combined:
        if symbol not in left.symbols:
            left, operator, right = right, _FLIPPED[operator], left
        infinite = _infinite(Expression(right))
        if infinite:
            return self._unbounded(operator, infinite)
        if left.op in ("abs", "power") and symbol not in right.symbols:
            return self._magnitude(left, operator, right, symbol)
        start, slope = self._line(Node("add", (left, Node("negate", (right,)))), symbol)
        bound = self._quotient(start, slope)
        if self._evaluator.less(slope, Fraction(0)):
            operator = _FLIPPED[operator]
        closed = "=" in operator
        if operator == "!=":
            return Combined("\\cup", (Interval(None, bound), Interval(bound, None)))
        if operator == "=":
            return Interval(bound, bound, True, True)
        return Interval(None, bound, False, closed) if "<" in operator else Interval(bound, None, closed, False)

    def _unbounded(self, operator: str, infinite: int) -> Interval:
        """x < ∞ holds for every number; x > ∞ for none, and is no answer."""
        if operator in (("<", "!=") if infinite > 0 else (">", "!=")):
            return Interval(None, None)
        raise NoValueError

    def _magnitude(self, left: Node, operator: str, bound: Node, symbol: str) -> Combined:
        """|u| < c is u < c and u > -c, |u| > c is u > c or u < -c, and u² is compared with the root."""
        if left.op == "power":
            if left.args[1] != number(2) or self._evaluator.less(self._number(Expression(bound)), Fraction(0)):
                raise NoValueError
            bound = Node("root", (bound, number(2)))
        if operator == "=":
            raise NoValueError
        above = self._condition(left.args[0], operator, bound, symbol)
        below = self._condition(left.args[0], _FLIPPED[operator], Node("negate", (bound,)), symbol)
        return Combined("\\cup" if ">" in operator else "\\cap", (above, below))

    def _line(self, difference: Node, symbol: str) -> tuple[Value, Value]:
        """Start and slope of a linear expression; refuses every other one."""
        evaluator = self._evaluator
        values = [evaluator.value(difference, {symbol: probe}, real=True) for probe in _PROBES]
        start, slope = values[0], self._difference(values[1], values[0])
        for probe, value in zip(_PROBES[2:], values[2:], strict=True):
            if not evaluator.same(
                self._difference(value, start),
                slope * (probe if isinstance(slope, Fraction) else evaluator.inexact(probe)),
            ):
                raise NoValueError
        if evaluator.same(slope, Fraction(0)):
            raise NoValueError
        return start, slope

    def _difference(self, one: Value, other: Value) -> Value:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one - other
        return self._evaluator.inexact(one) - self._evaluator.inexact(other)

    def _quotient(self, start: Value, slope: Value) -> Value:
        if isinstance(start, Fraction) and isinstance(slope, Fraction):
            return -start / slope
        return -self._evaluator.inexact(start) / self._evaluator.inexact(slope)


def _infinite(item: Any) -> int:
    """1 for ∞, -1 for -∞, else 0."""
    if not isinstance(item, Expression):
        return 0
    node = item.node
    if node.op == "negate" and node.args[0].op == "infinity":
        return -1
    return int(node.op == "infinity")
