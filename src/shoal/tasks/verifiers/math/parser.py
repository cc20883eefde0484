"""Recursive descent over the tokens of one expression. Every token is consumed, or the expression is unreadable.

Juxtaposition multiplies (2x, x(x+1), 2\\sqrt3), a whole number before a fraction of whole numbers is a mixed number, and what would
have two meanings (1/2x, 2 3) has none.
"""

from collections.abc import Sequence

from shoal.tasks.verifiers.math.expressions import Node, number
from shoal.tasks.verifiers.math.notation import names
from shoal.tasks.verifiers.math.tokens import CONNECTIVES, LONGEST_PRODUCT, WORDS, Token, UnreadableError

DEEPEST = 40
MOST_OPERATORS = 40
_FUNCTIONS = {
    **{f"\\{name}": name for name in names("sin cos tan cot sec csc sinh cosh tanh ln exp arcsin arccos arctan")},
    "\\asin": "arcsin", "\\acos": "arccos", "\\atan": "arctan", "\\log": "log", "\\abs": "abs",
}  # fmt: skip
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell"
)
_CONSTANTS = {"\\pi": "pi", "\\infty": "infinity"}
_PAIRS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
END = Token("mark", "")


def parse_expression(tokens: Sequence[Token]) -> Node:
    """With ± as an operation of its own; `signs` says what it stands for."""
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.here is not END:
        raise UnreadableError
    return node


def signs(node: Node) -> list[Node]:
    """The values that ± stands for, both signs changing together; the node itself where there is none."""
    if "plus_minus" not in node.ops:
        return [node]
    return [_signed(node, +1), _signed(node, -1)]


def _signed(node: Node, sign: int) -> Node:
    args = tuple(_signed(arg, sign) for arg in node.args)
    if node.op == "plus_minus":
        return args[0] if sign * node.value > 0 else Node("negate", args)
    return Node(node.op, args, node.value, node.name)


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = [part for token in tokens for part in _split(token)]
        self._position = 0
        self._depth = 0
        self._bars = 0

    @property
    def here(self) -> Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else END

    def _look(self, distance: int) -> Token:
        place = self._position + distance
        return self._tokens[place] if place < len(self._tokens) else END

    def _take(self) -> Token:
        token = self.here
        self._position += 1
        return token

    def _accept(self, text: str) -> bool:
        if self.here is END or self.here.text != text:
            return False
        self._position += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise UnreadableError

    def sum(self) -> Node:
        terms = [self._signed_term()]
        while self.here.text in ("+", "-", "\\pm", "\\mp"):
            terms.append(self._signed_term())
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signed_term(self) -> Node:
        sign = self._take().text if self.here.text in ("+", "-", "\\pm", "\\mp") else "+"
        if self.here.text in ("+", "-", "\\pm", "\\mp"):
            raise UnreadableError
        term = self._product()
        if sign == "-":
            return Node("negate", (term,))
        if sign == "+":
            return term
        return Node("plus_minus", (term,), value=number(1 if sign == "\\pm" else -1).value)

    def _product(self) -> Node:
        node = self._run()
        for _ in range(MOST_OPERATORS):
            if self.here.text not in ("*", "\\times", "/"):
                return node
            operator = self._take().text
            negative = self._accept("-")
            factor = self._run(divisor=operator == "/")
            factor = Node("negate", (factor,)) if negative else factor
            node = (
                Node("divide", (node, factor)) if operator == "/" else Node("multiply", (node, factor), name="explicit")
            )
        raise UnreadableError

    def _run(self, *, divisor: bool = False) -> Node:
        """Factors side by side. A divisor is one factor: 1/2x could be read in two ways."""
        factors = [self._factor()]
        while self._begins_factor():
            # 2 3 is no product, but n! 2^n is one.
            if divisor or (self.here.kind == "number" and factors[-1].op not in ("binomial", "factorial")):
                raise UnreadableError
            factors.append(self._factor())
        return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))

    def _begins_factor(self) -> bool:
        token = self.here
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "command":
            name = token.text[1:]
            return (
                name in GREEK or token.text in _FUNCTIONS or token.text in _CONSTANTS or token.text in _PAIRS
                or name in ("frac", "sqrt", "binom", "cuberoot")
            )  # fmt: skip
        return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)

    def _factor(self) -> Node:
        node = self._postfixed(self._primary())
        if self._accept("^"):
            node = self._postfixed(Node("power", (node, self._argument(signed=True))))
        if self.here.text == "^":
            raise UnreadableError
        return node

    def _postfixed(self, node: Node) -> Node:
        while self.here is not END and self.here.text in ("!", "\\degree"):
            factorial = self._take().text == "!"
            if factorial and (self.here.text == "!" or node.op == "factorial"):
                raise UnreadableError
            node = Node("factorial" if factorial else "degree", (node,))
        return node

    def _argument(self, *, signed: bool = False) -> Node:
        """What follows ^, \\frac or \\sqrt: a group, or else one digit, letter or command, as TeX takes it."""
        if self.here.text == "{":
            return self._group("{")
        if signed and self.here.text in ("+", "-"):
            sign = self._take().text
            inner = self._argument()
            return Node("negate", (inner,)) if sign == "-" else inner
        if self.here.text == "(" and signed:
            return self._group("(")
        if self.here.kind == "number":
            return number(self._whole_or_digit(signed))
        if self.here.kind in ("letter", "command"):
            return self._primary()
        raise UnreadableError

    def _whole_or_digit(self, signed: bool) -> int:
        """\\frac12 is 1/2 as in TeX. 2^10 means 2 to the 10 to everybody but TeX."""
        token = self._take()
        if not token.text.isdigit():
            raise UnreadableError
        if signed or len(token.text) == 1:
            return int(token.text)
        rest = Token("number", token.text[1:], number(int(token.text[1:])).value, in_text=token.in_text)
        self._position -= 1
        self._tokens[self._position] = rest
        return int(token.text[0])

    def _group(self, opening: str) -> Node:
        self._expect(opening)
        bars, self._bars = self._bars, 0
        node = self.sum()
        self._bars = bars
        self._expect(_PAIRS[opening])
        return node

    def _primary(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise UnreadableError
        node = self._operand()
        self._depth -= 1
        return node

    def _operand(self) -> Node:
        token = self.here
        if token.kind == "number":
            return self._number()
        if token.kind == "letter":
            return self._letter()
        if token.text in ("(", "[", "{"):
            return self._group(token.text)
        if token.text in ("\\lfloor", "\\lceil"):
            return Node("floor" if token.text == "\\lfloor" else "ceil", (self._group(token.text),))
        if token.text == "|":
            return self._absolute()
        if token.kind == "command":
            return self._command()
        raise UnreadableError

    def _number(self) -> Node:
        token = self._take()
        whole = token.text.replace(" ", "").isdigit()
        if whole and self._mixed_fraction():
            return Node("add", (number(token.value), self._primary()), name="mixed")
        if whole and self._mixed_slash():
            above, _, below = self._take(), self._take(), self._take()
            return Node("add", (number(token.value), number(above.value / below.value)), name="mixed")
        if self.here.text == "_":
            raise UnreadableError
        return Node("number", value=token.value, name="decimal" if token.decimal else "")

    def _mixed_fraction(self) -> bool:
        """\\frac with whole numbers above and below, directly after a whole number."""
        if self.here.text != "\\frac":
            return False
        shape = [self._look(distance) for distance in range(1, 7)]
        if shape[0].kind == "number":
            return len(shape[0].text) >= 2 or shape[1].kind == "number"
        return [token.text for token in shape if token.kind != "number"] == ["{", "}", "{", "}"] and shape[
            1
        ].kind == shape[4].kind == "number"

    def _mixed_slash(self) -> bool:
        """1 1/2: a space, then a fraction of whole numbers."""
        above, slash, below = (self._look(distance) for distance in range(3))
        plain = (
            above.kind == below.kind == "number" and above.text.isdigit() and below.text.isdigit() and below.value > 0
        )
        return plain and slash.text == "/" and above.spaced and above.text[0] != "0" and above.value < below.value

    def _letter(self) -> Node:
        token = self._take()
        if token.text in ("e", "i") and self.here.text != "_":
            return Node(token.text)
        return self._subscripted(token.text)

    def _subscripted(self, name: str) -> Node:
        if self._accept("_"):
            braced = self._accept("{")
            parts = [self._take()]
            while braced and self.here.text != "}":
                parts.append(self._take())
            if braced:
                self._expect("}")
            if any(part.kind == "mark" and part.text not in "+-,*" for part in parts) or parts[0] is END:
                raise UnreadableError
            name += "_" + "".join(part.text for part in parts)
        while self._accept("'"):
            name += "'"
        return Node("symbol", name=name)

    def _absolute(self) -> Node:
        self._expect("|")
        self._bars += 1
        node = self.sum()
        self._bars -= 1
        self._expect("|")
        return Node("abs", (node,))

    def _command(self) -> Node:
        name = self._take().text
        if name in _CONSTANTS:
            return Node(_CONSTANTS[name])
        if name[1:] in GREEK:
            return self._subscripted(name)
        if name == "\\frac":
            above = self._argument()
            return Node("divide", (above, self._argument()), name="fraction")
        if name == "\\binom":
            above = self._argument()
            return Node("binomial", (above, self._argument()))
        if name == "\\sqrt":
            return self._square_root()
        if name == "\\cuberoot":
            return Node("root", (self._argument(), number(3)))
        if name in _FUNCTIONS:
            return self._call(_FUNCTIONS[name])
        raise UnreadableError

    def _square_root(self) -> Node:
        index = self._group("[") if self.here.text == "[" else number(2)
        if self.here.kind == "number" and len(self.here.text) > 1:
            return Node("root", (number(self._take().value), index))
        return Node("root", (self._group("(") if self.here.text == "(" else self._argument(), index))

    def _call(self, name: str) -> Node:
        base = power = None
        if self._accept("_"):
            base = self._argument()
            if name != "log":
                raise UnreadableError
        if self._accept("^"):
            power = self._argument(signed=True)
        if power is not None and power.op == "negate" and power.args[0] == number(1):
            if name not in _INVERSES:
                raise UnreadableError
            name, power = _INVERSES[name], None
        argument = self._group(self.here.text) if self.here.text in ("(", "[", "{") else self._bare_argument()
        node = Node("log_base", (base, argument)) if base is not None else Node(name, (argument,))
        return Node("power", (node, power)) if power is not None else node

    def _bare_argument(self) -> Node:
        """sin 2x: the factors that follow, up to a sign or another function."""
        factors = [self._factor()]
        while self._begins_factor() and self.here.text not in _FUNCTIONS and self.here.text != "(":
            if self.here.kind == "number":
                raise UnreadableError
            factors.append(self._factor())
        return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))


def _split(token: Token) -> list[Token]:
    """Letters that spell a unit are a product where an expression is read: mg, ms."""
    splits = len(token.text) <= LONGEST_PRODUCT and not token.in_text and token.text.lower() not in CONNECTIVES | WORDS
    if token.kind == "word" and splits:
        return [Token("letter", letter) for letter in token.text]
    if token.kind == "word" and token.in_text and len(token.text) == 1:
        return [Token("letter", token.text)]
    return [token]
