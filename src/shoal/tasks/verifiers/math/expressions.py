"""Expressions as trees, and what they are worth: exact fractions where possible, 650 digits where not.

Two expressions are equal if they agree at pseudo-random points: their symbols get values from a hash of both sides. Sums,
products and powers of fractions are exact, so rational numbers have no tolerance; irrational ones agree in 320 digits or differ.
Numbers outside of 10^±300 and trees that cost too much have no value here. Costs are counted in operations, not in seconds: every
machine comes to the same end.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Any

import mpmath

from shoal.tasks.verifiers.math.notation import names

DIGITS = 650
LARGEST_POWER_BITS = 20_000
LARGEST_FACTORIAL = 1000
MOST_OPERATIONS = 20_000
AGREEING_POINTS = 6
MOST_POINTS = 48

Value = Any
"""Fraction, or a real or complex number of mpmath."""


class NoValueError(Exception):
    """Undefined here, or outside of what is computed."""


class UndefinedError(NoValueError):
    """There is no real number, or no number at all: a root or logarithm of a negative number, a division by zero."""


class TooCostlyError(Exception):
    """Comparing the two answers takes more operations than an answer may cost."""


@dataclass(frozen=True)
class Node:
    op: str
    args: tuple["Node", ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""

    @cached_property
    def symbols(self) -> frozenset[str]:
        own = frozenset({self.name}) if self.op == "symbol" else frozenset()
        return own.union(*(arg.symbols for arg in self.args))

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset({self.op}).union(*(arg.ops for arg in self.args))


def number(value: Fraction | int) -> Node:
    return Node("number", value=Fraction(value))


class Evaluator:
    """Evaluates the expressions of one comparison, within its precision and its number of operations."""

    def __init__(self, most_operations: int = MOST_OPERATIONS) -> None:
        self._left = most_operations

    @cached_property
    def mp(self) -> Any:
        context = mpmath.mp.clone()
        context.dps = DIGITS
        return context

    @cached_property
    def _tolerance(self) -> Any:
        return self.mp.mpf(10) ** -320

    def value(self, node: Node, point: dict[str, Fraction] | None = None, *, real: bool = False) -> Value:
        self.spend(1)
        if node.op == "number":
            return node.value
        if node.op == "symbol":
            if point is None or node.name not in point:
                raise NoValueError
            return point[node.name]
        values = [self.value(arg, point, real=real) for arg in node.args]
        return self._bounded(self._apply(node, values, real))

    def spend(self, operations: int) -> None:
        self._left -= operations
        if self._left < 0:
            raise TooCostlyError

    def _apply(self, node: Node, values: list[Value], real: bool) -> Value:
        exact = _EXACT.get(node.op)
        if exact is not None and all(isinstance(value, Fraction) for value in values):
            found = exact(*values)
            if found is not None:
                return found
        self.spend(20)
        inexact = _INEXACT.get(node.op)
        if inexact is None:
            raise NoValueError
        try:
            found = inexact(self.mp, *(self.inexact(value) for value in values))
        except (ValueError, ZeroDivisionError, OverflowError, mpmath.libmp.ComplexResult):
            raise UndefinedError from None
        if real and isinstance(found, self.mp.mpc):
            raise UndefinedError
        return found

    def inexact(self, value: Value) -> Value:
        if not isinstance(value, Fraction):
            return value
        return self.mp.mpf(value.numerator) / value.denominator

    def _bounded(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
            self.spend(bits >> 8)
            if bits > LARGEST_POWER_BITS:
                raise NoValueError
            return value
        size = abs(value)
        if not self.mp.isfinite(size):
            raise NoValueError
        if size < self.mp.mpf(10) ** -600:
            return Fraction(0)
        if not self.mp.mpf(10) ** -300 < size < self.mp.mpf(10) ** 300:
            raise NoValueError
        return value

    def same(self, one: Value, other: Value) -> bool:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one == other
        self.spend(1)
        one, other = self.inexact(one), self.inexact(other)
        return bool(abs(one - other) <= max(abs(one), abs(other), 1) * self._tolerance)

    def less(self, one: Value, other: Value) -> bool:
        """Of two real numbers; complex ones have no order."""
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one < other
        one, other = self.inexact(one), self.inexact(other)
        if isinstance(one, self.mp.mpc) or isinstance(other, self.mp.mpc):
            raise NoValueError
        return bool(one < other) and not self.same(one, other)

    def equal(self, one: Node, other: Node) -> bool:
        """Whether two expressions in the same symbols are the same function."""
        if not one.symbols and not other.symbols:
            return self.same(self.value(one), self.value(other))
        return self._agree(one, other, lambda left, right: self.same(left, right))

    def proportional(self, one: Node, other: Node, *, positive: bool) -> bool:
        """Whether one is the other times a constant that is not zero; with `positive`, greater than zero."""
        ratios: list[Value] = []

        def agree(left: Value, right: Value) -> bool:
            if self.same(left, Fraction(0)) or self.same(right, Fraction(0)):
                return self.same(left, right)
            ratio = (
                left / right if isinstance(left, Fraction) and isinstance(right, Fraction) else self._ratio(left, right)
            )
            ratios.append(ratio)
            return self.same(ratios[0], ratio) and (not positive or self.less(Fraction(0), ratio))

        return self._agree(one, other, agree) and bool(ratios)

    def _ratio(self, one: Value, other: Value) -> Value:
        return self.inexact(one) / self.inexact(other)

    def _agree(self, one: Node, other: Node, agree: Callable[[Value, Value], bool]) -> bool:
        whole = bool({"factorial", "binomial"} & (one.ops | other.ops))
        for points in (
            [_points(one, other, whole=True)] if whole else [_points(one, other), _points(one, other, whole=True)]
        ):
            agreeing = 0
            for point in islice(points, MOST_POINTS):
                pair = self._pair(one, other, point)
                if pair is None:
                    continue
                if pair[1] is None or not agree(*pair):
                    return False
                agreeing += 1
                if agreeing == AGREEING_POINTS:
                    return True
        return False

    def _pair(self, one: Node, other: Node, point: dict[str, Fraction]) -> tuple[Value, Value | None] | None:
        """Both values at a point, in the reals unless i is named; None where the first has no value.

        The second is None where only the first is defined. That is no difference if the first has a root or a logarithm and some
        symbol is negative: the symbols of √(ab) and √a√b are understood to be positive.
        """
        real = "i" not in one.ops | other.ops
        value = None
        try:
            value = self.value(one, point, real=real)
            return value, self.value(other, point, real=real)
        except UndefinedError:
            forgiven = value is None or (_is_partial(one) and min(point.values()) < 0)
            return None if forgiven else (value, None)
        except NoValueError:
            return None


def _is_partial(node: Node) -> bool:
    """Whether it has a root, a logarithm or a power that is not whole."""
    whole_power = node.op != "power" or (
        node.args[1].ops <= {"number", "negate"} and "decimal" not in node.args[1].name
    )
    return node.op in _PARTIAL or not whole_power or any(map(_is_partial, node.args))


_PARTIAL = names("root ln log log_base arcsin arccos")


def _points(one: Node, other: Node, *, whole: bool = False) -> Iterator[dict[str, Fraction]]:
    """Values for the symbols, of several sizes and signs, from a hash of both expressions."""
    symbols = sorted(one.symbols | other.symbols)
    seed = repr((one, other)).encode()
    for index in range(1 << 16):
        digits = (
            blake2b(seed + index.to_bytes(4, "little"), digest_size=8 * len(symbols)).digest()
            if len(symbols) < 8
            else b""
        )
        drawn = [int.from_bytes(digits[8 * place : 8 * place + 8], "little") for place in range(len(symbols))]
        if not digits:
            return
        yield {name: _coordinate(bits, index, whole) for name, bits in zip(symbols, drawn, strict=True)}


def _coordinate(bits: int, index: int, whole: bool) -> Fraction:
    if whole:
        return Fraction(1 + bits % 24)
    size = (Fraction(1), Fraction(4), Fraction(30))[index % 3]
    # All positive, all negative, all positive, mixed: |x| is not x.
    sign = -1 if index % 4 == 1 or (index % 4 == 3 and bits >> 60 & 1) else 1
    return sign * size * Fraction(1 + bits % 9973, 9973)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return (
            _exact_root(base, exponent.denominator, exponent.numerator)
            if exponent.denominator <= 12 and base >= 0
            else None
        )
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base in (0, 1, -1):
        size = 1
    if abs(exponent.numerator) * (size - 1) > LARGEST_POWER_BITS:
        raise NoValueError
    if not base and exponent <= 0:
        raise UndefinedError
    # The parity is all that matters for ±1, however large the exponent is.
    return (
        base**exponent.numerator
        if base not in (1, -1)
        else (Fraction(1) if base == 1 or exponent % 2 == 0 else Fraction(-1))
    )


def _exact_root(base: Fraction, index: int, power: int) -> Fraction | None:
    roots = [_whole_root(part, index) for part in (base.numerator, base.denominator)]
    if roots[0] is None or roots[1] is None or not roots[1]:
        return None
    return _power(Fraction(roots[0], roots[1]), Fraction(power))


def _whole_root(value: int, index: int) -> int | None:
    if value.bit_length() > 2000:
        return None
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low if low**index == value else None


def _root(base: Fraction, index: Fraction) -> Fraction | None:
    """The real root: of a negative number where the index is odd."""
    if index.denominator != 1 or not 0 < index <= 12:
        return None
    found = _exact_root(abs(base), int(index), 1)
    if found is None or base >= 0:
        return found
    return -found if index % 2 else None


def _inexact_root(mp: Any, base: Any, index: Any) -> Any:
    whole = int(index) if index == int(index) else 0
    if whole % 2 and isinstance(base, mp.mpf) and base < 0:
        return -mp.root(-base, whole)
    return mp.sqrt(base) if index == 2 else mp.power(base, 1 / index)


def _divide(one: Fraction, other: Fraction) -> Fraction:
    if not other:
        raise UndefinedError
    return one / other


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= LARGEST_FACTORIAL:
        raise NoValueError
    return Fraction(math.factorial(int(value)))


def _binomial(above: Fraction, below: Fraction) -> Fraction:
    if above.denominator != 1 or below.denominator != 1 or not 0 <= above <= LARGEST_FACTORIAL or below < 0:
        raise NoValueError
    return Fraction(math.comb(int(above), int(below)))


def _logarithm(base: Fraction, value: Fraction) -> Fraction | None:
    """Exact where one whole number is a power of the other."""
    if value <= 0 or base <= 0 or base == 1:
        raise UndefinedError
    exponent = round(math.log(value) / math.log(base)) if max(value, base, 1 / value, 1 / base) < 10**200 else 0
    return Fraction(exponent) if abs(exponent) < 1000 and base**exponent == value else None


_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "add": lambda *values: sum(values, Fraction(0)),
    "multiply": lambda *values: math.prod(values, start=Fraction(1)),
    "divide": _divide,
    "negate": lambda value: -value,
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "log_base": _logarithm,
}


def _log(mp: Any, value: Any) -> Any:
    return mp.log(value) / mp.log(mp.mpf(7) / 3)


_INEXACT: dict[str, Callable[..., Any]] = {
    "add": lambda mp, *values: mp.fsum(values),
    "multiply": lambda mp, *values: mp.fprod(values),
    "divide": lambda mp, one, other: one / other,
    "negate": lambda mp, value: -value,
    "power": lambda mp, base, exponent: mp.power(base, exponent),
    "root": _inexact_root,
    "abs": lambda mp, value: abs(value),
    "floor": lambda mp, value: mp.floor(value),
    "ceil": lambda mp, value: mp.ceil(value),
    "degree": lambda mp, value: value * mp.pi / 180,
    "pi": lambda mp: +mp.pi,
    "e": lambda mp: +mp.e,
    "i": lambda mp: mp.mpc(0, 1),
    "ln": lambda mp, value: mp.log(value),
    # A logarithm without a base equals only what holds in every base: 2 log 3 = log 9, but log 100 is not 2.
    "log": _log,
    "log_base": lambda mp, base, value: mp.log(value) / mp.log(base),
    "exp": lambda mp, value: mp.exp(value),
    **{
        name: (lambda mp, value, name=name: getattr(mp, name)(value))
        for name in names("sin cos tan cot sec csc sinh cosh tanh")
    },
    **{f"arc{name}": (lambda mp, value, name=name: getattr(mp, f"a{name}")(value)) for name in ("sin", "cos", "tan")},
}
