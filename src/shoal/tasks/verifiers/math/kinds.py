"""The kinds of answers that the grammar knows; `reader` makes them from tokens, `comparison` compares them."""

from dataclasses import dataclass
from typing import Any

from shoal.tasks.verifiers.math.expressions import Node
from shoal.tasks.verifiers.math.units import Unit


@dataclass(frozen=True)
class Expression:
    node: Node


@dataclass(frozen=True)
class Quantity:
    node: Node
    unit: Unit
    sure: bool
    """Written so that the unit is no variable: a symbol, a word, or inside \\text{…}."""


@dataclass(frozen=True)
class Percent:
    node: Node


@dataclass(frozen=True)
class Based:
    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Node, ...]
    is_time: bool = False
    """Written as only a time is: 10:05."""


@dataclass(frozen=True)
class Clock:
    """A time of the day with its half: 2:30 pm."""

    minutes: int


@dataclass(frozen=True)
class Relation:
    """Sides with the operators between them: x = 5, 1 < x ≤ 2."""

    sides: tuple[Any, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Labelled:
    """A name = a value: x = 5, f(x) = x², AB = 3, Area = 4 cm²."""

    label: str
    answer: Any
    symbol: Node | None
    """The name as an expression, where it is one."""
    approximate: bool = False
    """Written with ≈."""


@dataclass(frozen=True)
class Items:
    """`shape` is "list" for bare commas, "set", or the pair of brackets of a tuple."""

    shape: str
    items: tuple[Any, ...]
    connective: str = ","


@dataclass(frozen=True)
class Joined:
    """Sets joined by ∪, ∩ or ∖."""

    parts: tuple[Any, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """x ∈ set."""

    symbol: str
    members: Any


@dataclass(frozen=True)
class Reals:
    pass


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Words:
    text: str
