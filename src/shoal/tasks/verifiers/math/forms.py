"""How an answer is written: as a plain number, rounded, not computed, not solved, as a time, as a name.

What is not computed or not solved may be the question itself, copied. These are properties of the form; values are compared in
`comparison`.
"""

import re
from typing import Any

from shoal.tasks.verifiers.math.expressions import Node, number
from shoal.tasks.verifiers.math.kinds import Expression, Items, Labelled, Percent, Quantity, Ratio, Relation, Words

_FUNCTION_LABEL = re.compile(r"[A-Za-z]\w*'*\([a-z](?:,[a-z])*\)|\([a-z](?:,[a-z])+\)")
_LITERAL_OPS = frozenset({"number", "negate", "divide"})
_COUNTING_OPS = _LITERAL_OPS | {"power", "factorial", "binomial"}


def is_literal(node: Node) -> bool:
    """A number as it is written down: 5, -0.25, 1/3, 1½, 2·10³."""
    return not node.symbols and (node.ops <= _LITERAL_OPS or _is_mixed(node) or _is_scientific(node))


def _is_mixed(node: Node) -> bool:
    return node.name == "mixed" or (node.op == "negate" and node.args[0].name == "mixed")


def _is_scientific(node: Node) -> bool:
    if node.op == "negate":
        return _is_scientific(node.args[0])
    power = node.args[-1] if node.op == "multiply" and len(node.args) == 2 else None
    return node.name == "scaled" or (
        power is not None and power.op == "power" and power.args[0] == number(10) and node.args[0].op == "number"
    )


def is_unevaluated(node: Node) -> bool:
    """A sum, a product or a function of plain numbers: it may be the question itself. Powers, factorials and binomials count."""
    if _is_mixed(node) or _is_scientific(node):
        return False
    own = not node.symbols and node.op not in _COUNTING_OPS
    return own or any(is_unevaluated(arg) for arg in node.args)


def is_unsolved(kind: Any) -> bool:
    """A condition on one variable that is not alone on its side, such as 3x = 15: it may be the question itself."""
    if isinstance(kind, Items) and kind.shape == "list":
        return any(map(is_unsolved, kind.items))
    if isinstance(kind, Labelled):
        sides: tuple[Any, ...] = (Expression(kind.symbol) if kind.symbol is not None else None, kind.answer)
    elif isinstance(kind, Relation):
        sides = kind.sides
    else:
        return False
    nodes = [side.node for side in sides if isinstance(side, Expression)]
    if len(nodes) < len(sides) or len(frozenset[str]().union(*(node.symbols for node in nodes))) != 1:
        return False
    return any(node.symbols and not _is_variable(node) for node in nodes)


def _is_variable(node: Node) -> bool:
    """x, -x or |x|."""
    return node.op == "symbol" or (node.op in ("negate", "abs") and node.args[0].op == "symbol")


def names_a_value(truth: Labelled) -> bool:
    """Whether x = 5 may be answered by 5: the left side is a name and not a product of variables."""
    if truth.symbol is None or truth.symbol.op == "symbol":
        return True
    return truth.label.isupper() or _FUNCTION_LABEL.fullmatch(truth.label) is not None


def is_spelled(item: Any) -> bool:
    """A word or letters: "A or C" does not say both, "2 or 3" lists the values of a variable."""
    return isinstance(item, Words) or (
        isinstance(item, Expression) and item.node.ops <= {"symbol", "multiply", "e", "i"}
    )


def is_rounded(truth: Any) -> bool:
    """Whether a ground truth is a decimal number, which an answer may state with ≈."""
    if isinstance(truth, Labelled):
        return truth.approximate or is_rounded(truth.answer)
    return isinstance(truth, Expression | Quantity | Percent) and "decimal" in _names(truth.node)


def _names(node: Node) -> list[str]:
    return [node.name, *(name for arg in node.args for name in _names(arg))]


def is_clock(ratio: Ratio) -> bool:
    last = ratio.parts[-1]
    return ratio.is_time or (last.op == "number" and (10 <= last.value <= 59 or not last.value))
