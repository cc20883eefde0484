"""The grammar of answers: from tokens to one of the `kinds`, the whole answer or nothing.

Numbers and expressions, quantities, percentages, numbers in a base, ratios, equations and inequalities, unions of intervals, lists,
sets, tuples, matrices, words. Two comma rules: bare commas make a list, commas in brackets a tuple.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from shoal.tasks.verifiers.math.everyday import clock, in_several_units, spelled_number
from shoal.tasks.verifiers.math.expressions import Node, number
from shoal.tasks.verifiers.math.kinds import (
    Based,
    Expression,
    Items,
    Joined,
    Labelled,
    Matrix,
    Member,
    Percent,
    Quantity,
    Ratio,
    Reals,
    Relation,
    Words,
)
from shoal.tasks.verifiers.math.parser import GREEK, parse_expression, signs
from shoal.tasks.verifiers.math.tokens import (
    CLOSING,
    CONNECTIVES,
    LONGEST_PRODUCT,
    OPENING,
    WORDS,
    Token,
    UnreadableError,
)
from shoal.tasks.verifiers.math.units import Unit, read_unit

MOST_ITEMS = 40
_RELATIONS = {"=": "=", "\\approx": "~", "<": "<", ">": ">", "\\leq": "<=", "\\geq": ">=", "\\neq": "!="}
_BASES = dict(
    zip(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "sixteen"),
        [*range(2, 13), 16],
        strict=True,
    )
)
_LABEL_MARKS = frozenset({"(", ")", "_", "{", "}", "'", ",", "|", "\\angle", "\\triangle"})
_MATRICES = frozenset(f"{name}matrix" for name in ("", "p", "b", "small"))


def read(tokens: Sequence[Token], own_words: frozenset[str] = frozenset()) -> Any:
    """The answer that these tokens are."""
    return _Reader(own_words).answer(list(tokens))


class _Reader:
    def __init__(self, own_words: frozenset[str]) -> None:
        self._own_words = own_words

    def answer(self, tokens: list[Token]) -> Any:
        if not tokens:
            raise UnreadableError
        parts, connectives = _split(tokens, (",", ";"), words=True)
        if len(parts) == 1:
            return self._single(tokens)
        if len(parts) > MOST_ITEMS:
            raise UnreadableError
        items = tuple(item for part in parts for item in self._expanded(part))
        kinds = set(connectives) - {","}
        if len(kinds) > 1 or ("or" in kinds and "," in connectives and "and" in kinds):
            raise UnreadableError
        return Items("list", items, kinds.pop() if kinds else ",")

    def _expanded(self, part: list[Token]) -> tuple[Any, ...]:
        """± stands for two items of a list."""
        item = self._single(part)
        return item.items if isinstance(item, Items) and item.connective == "±" else (item,)

    def _single(self, tokens: list[Token]) -> Any:
        if not tokens:
            raise UnreadableError
        for rule in (
            self._member,
            self._relation,
            self._joined,
            self._bracketed,
            self._matrix,
            clock,
            self._words,
            self._based,
        ):
            found = rule(tokens)
            if found is not None:
                return found
        return self._ratio(tokens) or self._quantity(tokens) or self._expression(tokens)

    def _member(self, tokens: list[Token]) -> Member | None:
        if len(tokens) > 2 and tokens[0].kind == "letter" and tokens[1].text == "\\in":
            return Member(tokens[0].text, self._single(tokens[2:]))
        return None

    def _relation(self, tokens: list[Token]) -> Any:
        parts, operators = _split(tokens, tuple(_RELATIONS))
        if not operators:
            return None
        if len(operators) > 4:
            raise UnreadableError
        signs_found = tuple(_RELATIONS[found] for found in operators)
        if signs_found == ("=",) and _is_label(parts[1]) and not _is_label(parts[0]):
            parts.reverse()
        if set(signs_found) <= {"=", "~"} and (not parts[0] or _is_label(parts[0])):
            label = "".join(token.text for token in parts[0])
            answer = self._equal_sides(parts[1:], signs_found[1:])
            return Labelled(label, answer, _as_node(parts[0]), approximate=signs_found[0] == "~")
        return Relation(tuple(self._single(part) for part in parts), signs_found)

    def _equal_sides(self, parts: list[list[Token]], operators: tuple[str, ...]) -> Any:
        sides = tuple(self._single(part) for part in parts)
        return sides[0] if len(sides) == 1 else Relation(sides, operators)

    def _joined(self, tokens: list[Token]) -> Any:
        parts, operators = _split(tokens, ("\\cup", "\\cap", "\\setminus"))
        if not operators:
            return Reals() if [token.text for token in tokens] == ["\\reals"] else None
        return Joined(tuple(self._single(part) for part in parts), tuple(operators))

    def _bracketed(self, tokens: list[Token]) -> Any:
        opening, closing = tokens[0].text, tokens[-1].text
        if opening not in OPENING or len(tokens) < 2 or not _encloses(tokens):
            return None
        inner = tokens[1:-1]
        if opening == "\\{" and closing == "\\}":
            return self._set(inner)
        if opening == "{":
            return self.answer(inner)
        parts, _ = _split(inner, (",", ";"))
        if len(parts) == 1:
            if opening + closing != "()":
                raise UnreadableError
            return self.answer(inner)
        if len(parts) > MOST_ITEMS:
            raise UnreadableError
        return Items(opening + closing, tuple(self._single(part) for part in parts))

    def _set(self, inner: list[Token]) -> Any:
        if len(inner) > 2 and inner[0].kind == "letter":
            condition = inner[3:] if [token.text for token in inner[1:3]] == ["\\in", "\\reals"] else inner[1:]
            if condition and condition[0].text in ("|", ":", "\\mid"):
                return self.answer(condition[1:])
        parts, _ = _split(inner, (",", ";"))
        if len(parts) > MOST_ITEMS:
            raise UnreadableError
        return Items("set", tuple(item for part in parts for item in self._expanded(part)) if inner else ())

    def _matrix(self, tokens: list[Token]) -> Matrix | None:
        names = [token.text for token in (tokens[0], tokens[-1])]
        environment = names[0].removeprefix("\\begin{").removesuffix("}")
        if environment not in _MATRICES or names[1] != f"\\end{{{environment}}}":
            return None
        rows, _ = _split(tokens[1:-1], ("\\\\",))
        if rows and not rows[-1]:
            rows.pop()
        made = tuple(tuple(self._single(cell) for cell in _split(row, ("&",))[0]) for row in rows)
        if sum(map(len, made)) > MOST_ITEMS or len({len(row) for row in made}) != 1:
            raise UnreadableError
        return Matrix(made)

    def _words(self, tokens: list[Token]) -> Words | Reals | Expression | None:
        if tokens[0].text == "\\emptyset" and len(tokens) == 1:
            return Words("no solution")
        wordy = (
            any(token.kind == "word" and _is_wordy(token) for token in tokens)
            and max(len(token.text) for token in tokens) > 1
        )
        if not wordy or any(token.kind not in ("word", "letter") and token.text not in "-'." for token in tokens):
            return None
        found = words("".join(f" {token.text}" if token.spaced else token.text for token in tokens))
        if found.text in _ALL_REALS:
            return Reals()
        value = spelled_number(found.text)
        return found if value is None else Expression(number(value))

    def _based(self, tokens: list[Token]) -> Based | None:
        place = next((place for place, token in enumerate(tokens) if token.text == "_"), 0)
        digits, base = tokens[:place], [token for token in tokens[place + 1 :] if token.text not in "{}"]
        if not digits or (digits[0].kind == "letter" and place == 1) or len(base) != 1 or tokens[0].kind == "command":
            return None
        written = "".join(token.text for token in digits if token.text not in "()").lower()
        value = int(base[0].value) if base[0].kind == "number" else _BASES.get(base[0].text.lower(), 0)
        if not written.isalnum() or not 2 <= value <= 36 or any(int(digit, 36) >= value for digit in written):
            return None
        return Based(written.lstrip("0") or "0", value)

    def _ratio(self, tokens: list[Token]) -> Ratio | None:
        parts, operators = _split(tokens, (":",))
        if not operators:
            return None
        is_time = any(len(part) == 1 and part[0].text[:1] == "0" and len(part[0].text) == 2 for part in parts[1:])
        return Ratio(tuple(parse_expression(part) for part in parts), is_time)

    def _quantity(self, tokens: list[Token]) -> Any:
        """A sign of currency before, or a unit or percent sign after, an expression."""
        negative = tokens[0].text == "-" and len(tokens) > 2
        front = tokens[1:] if negative else tokens
        if front[0].text in ("$", "\\euro", "\\pound", "\\yen", "\\rupee"):
            unit = read_unit(front[:1])
            rest = front[1:]
            scale = _first_unit(rest, self._own_words)
            factor = read_unit(rest[scale:], self._own_words) if scale < len(rest) else Unit((), Fraction(1))
            if unit is None or factor is None or factor.bases not in ((), unit.bases):
                return None
            return self._measured(tokens[:1] * negative + rest[:scale], Unit(unit.bases, factor.factor), sure=True)
        if tokens[-1].text == "%" or (tokens[-1].kind == "word" and tokens[-1].text.lower() == "percent"):
            return Percent(self._plain(tokens[:-1]))
        if [token.text.lower() for token in tokens[-2:]] == ["per", "cent"]:
            return Percent(self._plain(tokens[:-2]))
        return in_several_units(tokens) or self._with_unit(tokens)

    def _with_unit(self, tokens: list[Token]) -> Any:
        start = _first_unit(tokens, self._own_words)
        if not 0 < start < len(tokens):
            return None
        unit = read_unit(tokens[start:], self._own_words)
        if unit is None:
            return None
        return self._measured(tokens[:start], unit, sure=not _is_lone_letter(tokens[start:]))

    def _measured(self, tokens: list[Token], unit: Unit, *, sure: bool) -> Any:
        node = self._plain(tokens)
        if unit.bases:
            return Quantity(node, unit, sure)
        return Expression(Node("multiply", (node, Node("number", value=unit.factor)), name="scaled"))

    def _plain(self, tokens: list[Token]) -> Node:
        node = parse_expression(tokens)
        if "plus_minus" in node.ops:
            raise UnreadableError
        return node

    def _expression(self, tokens: list[Token]) -> Any:
        node = parse_expression(tokens)
        if node.op == "degree":
            unit = read_unit([Token("command", "\\degree")])
            assert unit is not None
            return Quantity(node.args[0], unit, True)
        values = signs(node)
        if len(values) == 1:
            return Expression(node)
        return Items("list", tuple(Expression(value) for value in values), "±")


def _is_wordy(token: Token) -> bool:
    return token.in_text or len(token.text) > LONGEST_PRODUCT or token.text.lower() in WORDS


def words(text: str) -> Words:
    plain = " ".join(text.replace("-", " ").replace(".", " ").split()).casefold()
    return Words(_SYNONYMS.get(plain, plain))


_ALL_REALS = frozenset({"all real numbers", "all reals", "the real numbers", "any real number"})
_SYNONYMS = dict.fromkeys(
    ("no solutions", "none", "no real solution", "no real solutions", "empty set", "the empty set", "no such values"),
    "no solution",
) | {"dne": "does not exist"}


def _split(
    tokens: Sequence[Token], marks: tuple[str, ...], *, words: bool = False
) -> tuple[list[list[Token]], list[str]]:
    """The tokens between marks that are outside of all brackets, and the marks; with `words`, "or" and "and" are marks too."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        depth += _step(token)
        connective = _connective(token) if words else ""
        if depth == 0 and (token.text in marks or connective):
            parts.append([])
            found.append(connective or ("," if words else token.text))
        else:
            parts[-1].append(token)
    if depth:
        raise UnreadableError
    return _merged(parts, found) if words else (parts, found)


def _step(token: Token) -> int:
    if token.text in OPENING or token.text.startswith("\\begin{"):
        return 1
    return -1 if token.text in CLOSING or token.text.startswith("\\end{") else 0


def _connective(token: Token) -> str:
    if token.kind == "word" and token.text.lower() in CONNECTIVES:
        return token.text.lower()
    return {"\\lor": "or", "\\land": "and"}.get(token.text, "")


def _merged(parts: list[list[Token]], found: list[str]) -> tuple[list[list[Token]], list[str]]:
    """1, 2, and 3 has an empty part between its last comma and its connective."""
    marks: list[str] = []
    kept = [parts[0]]
    for part, mark in zip(parts[1:], found, strict=True):
        if not kept[-1] and marks and marks[-1] == "," and mark in CONNECTIVES:
            kept[-1], marks[-1] = part, mark
        else:
            kept.append(part)
            marks.append(mark)
    return kept, marks


def _as_node(tokens: list[Token]) -> Node | None:
    try:
        return parse_expression(tokens)
    except UnreadableError:
        return None


def _encloses(tokens: list[Token]) -> bool:
    """Whether the first bracket is closed by the last token and no earlier."""
    depth = 0
    for place, token in enumerate(tokens):
        depth += 1 if token.text in OPENING else -1 if token.text in CLOSING else 0
        if depth == 0:
            return place == len(tokens) - 1
    return False


def _is_label(tokens: list[Token]) -> bool:
    """One word, or letters with subscripts and arguments: Area, x, f(x), AB, \\angle ABC."""
    spelled = [place for place, token in enumerate(tokens) if token.kind == "word"]
    if spelled:
        return (
            spelled == [0]
            and tokens[0].text.lower() not in WORDS
            and [token.text for token in tokens[1:2]] in ([], ["_"], ["("])
        )
    return all(
        token.kind == "letter" or token.text in _LABEL_MARKS or token.text[1:] in GREEK
        or (token.kind == "number" and _after_subscript(tokens, place))
        for place, token in enumerate(tokens)
    )  # fmt: skip


def _after_subscript(tokens: list[Token], place: int) -> bool:
    return any(token.text == "_" for token in tokens[max(0, place - 2) : place])


def _first_unit(tokens: Sequence[Token], own_words: frozenset[str]) -> int:
    """Where the unit begins: at the first word or unit letter that stands apart from the number."""
    for place, token in enumerate(tokens):
        if token.kind == "word" and token.text.lower() not in CONNECTIVES:
            return place
        if (
            place
            and (token.kind == "command" or token.text == "$")
            and read_unit(tokens[place:])
            and token.text != "\\degree"
        ):
            return place
        if (
            place
            and token.kind == "letter"
            and token.spaced
            and tokens[place - 1].kind == "number"
            and read_unit(tokens[place:])
        ):
            return place
    return len(tokens)


def _is_lone_letter(tokens: Sequence[Token]) -> bool:
    return tokens[0].kind == "letter"
