"""From the spelling of an answer to tokens: numbers, letters, words, commands and marks, each character in exactly one.

Numbers are exact fractions: decimals, thousands, scientific notation, repeating decimals. A character that no rule takes makes the
whole answer unreadable, which earns nothing.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from shoal.tasks.verifiers.math.notation import closes_at, names

Kind = Literal["number", "letter", "word", "command", "mark"]
LONGEST_NUMBER = 600
LARGEST_EXPONENT = 2000
MOST_TOKENS = 400
DEEPEST = 30
OPENING = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "{": "}"}
CLOSING = frozenset(OPENING.values())
LONGEST_PRODUCT = 3
"""Letters in a row that may be a product; more of them are a word."""


class UnreadableError(Exception):
    """The answer is not wholly in the grammar."""


@dataclass(frozen=True)
class Token:
    kind: Kind
    text: str
    value: Fraction = Fraction(0)
    spaced: bool = False
    """White space stands before it."""
    in_text: bool = False
    """Written inside \\text{…}."""
    decimal: bool = False
    """A number with a point, or in scientific notation."""

    @property
    def key(self) -> tuple[str, object]:
        if self.kind == "number":
            return "number", self.text if self.text[:1] == "0" and self.text.isdigit() else self.value
        # In words of one or two letters the case counts: 5 Mm are no 5 mm.
        folds = self.kind == "word" and (len(self.text) > 2 or self.text.lower() in WORDS)
        return ("word" if self.kind == "word" else "mark"), (self.text.casefold() if folds else self.text)


_DIGITS = r"[0-9](?:[0-9]|(?<=[0-9])[ ](?=[0-9]{3}(?![0-9/])))*"
_NUMBER = re.compile(
    rf"(?P<whole>{_DIGITS})?(?:(?P<point>\.)(?P<decimals>[0-9]*)"
    r"(?:\\overline\s*\{(?P<bar>[0-9]+)\}|\\dot\s*\{(?P<dot>[0-9])\}|\((?P<round>[0-9]+)\)(?![0-9])|(?P<dots>\.\.\.|\\ldots))?)?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,6})(?![0-9A-Za-z.^_]))?"
)
_NUMBER_START = re.compile(r"[0-9]|\.(?:[0-9]|\\overline|\\dot(?![A-Za-z]))")
_THOUSANDS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_SPACED_DIGITS = re.compile(r"[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_LETTERS = re.compile(r"[A-Za-z]+")
_SPACE = re.compile(r"\s*")
_MARKS = frozenset("+-*/^_=<>()[]{}|,;:!%$'&?.\"")
FUNCTIONS = names("sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log exp sqrt abs")
NAMED = {"pi": "\\pi", "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty", "theta": "\\theta"}
WORDS = names("no yes all odd none even true false dne am pm up not one two six ten on in is it of to")
"""Words that letters would spell as a product."""
CONNECTIVES = frozenset({"or", "and"})


def without_thousands(text: str) -> str:
    """The text with its commas between groups of three digits read as separators of thousands."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)


def tokens_of(text: str, known_words: frozenset[str]) -> list[Token]:
    """All of the text; letters that spell one of the known words, a connective or a function stay together."""
    found = list(_scan(text, known_words, in_text=False))
    if len(found) > MOST_TOKENS or _depth(found) > DEEPEST:
        raise UnreadableError
    return found


def _depth(tokens: list[Token]) -> int:
    """How deep brackets of any kind are nested."""
    depths = accumulate(1 if token.text in OPENING else -1 if token.text in CLOSING else 0 for token in tokens)
    return max(depths, default=0)


def _scan(text: str, known: frozenset[str], *, in_text: bool) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        space = _SPACE.match(text, position)
        assert space is not None
        start, spaced = space.end(), space.end() > position
        if start == len(text):
            break
        made, position = _next(text, start, known, in_text)
        tokens += [*(_spaced(token) for token in made[:1]), *made[1:]] if spaced else made
    return tokens


def _spaced(token: Token) -> Token:
    return Token(token.kind, token.text, token.value, True, token.in_text, token.decimal)


def _next(text: str, start: int, known: frozenset[str], in_text: bool) -> tuple[list[Token], int]:
    character = text[start]
    if _NUMBER_START.match(text, start):
        return _number(text, start, in_text)
    if character == "\\":
        return _command(text, start, known, in_text)
    letters = _LETTERS.match(text, start)
    if letters:
        return _letters(letters.group(), known, in_text), letters.end()
    if character in _MARKS or (in_text and character in "’"):
        return [Token("mark", character, in_text=in_text)], start + 1
    raise UnreadableError


def _number(text: str, start: int, in_text: bool) -> tuple[list[Token], int]:
    found = _NUMBER.match(text, start)
    assert found is not None
    if found.end() - start > LONGEST_NUMBER:
        raise UnreadableError
    whole = found["whole"] or ""
    if not _SPACED_DIGITS.fullmatch(whole or "0"):
        raise UnreadableError
    value = Fraction(int(whole.replace(" ", "") or "0")) + _decimals(found)
    exponent = int(found["exponent"] or 0)
    if abs(exponent) > LARGEST_EXPONENT:
        raise UnreadableError
    decimal = bool(found["point"] or found["exponent"])
    return [
        Token("number", found.group(), value * Fraction(10) ** exponent, in_text=in_text, decimal=decimal)
    ], found.end()


def _decimals(found: re.Match[str]) -> Fraction:
    decimals = found["decimals"] or ""
    repeated = found["bar"] or found["dot"] or found["round"] or ""
    if found["dots"]:
        decimals, repeated = _repetition(decimals)
    scale = Fraction(1, 10 ** len(decimals))
    value = Fraction(int(decimals or "0")) * scale
    return value + scale * Fraction(int(repeated), 10 ** len(repeated) - 1) if repeated else value


def _repetition(decimals: str) -> tuple[str, str]:
    """0.1666… repeats its 6: a digit that is written three times or a longer block that is written twice."""
    for size in range(1, len(decimals) // 2 + 1):
        block, times = decimals[-size:], 3 if size == 1 else 2
        if decimals.endswith(block * times):
            return decimals, block
    raise UnreadableError


def _command(text: str, start: int, known: frozenset[str], in_text: bool) -> tuple[list[Token], int]:
    found = _COMMAND.match(text, start)
    if found is None:
        raise UnreadableError
    name = found.group()
    if name not in ("\\text", "\\letter", "\\begin", "\\end"):
        return [_as_token(name, in_text)], found.end()
    inner, end = _group(text, found.end())
    if name in ("\\begin", "\\end"):
        return [Token("command", f"{name}{{{inner}}}")], end
    return _scan(inner, known, in_text=name == "\\text"), end


def _as_token(name: str, in_text: bool) -> Token:
    if name in ("\\%", "\\$"):
        return Token("mark", name[1], in_text=in_text)
    return Token("word", name[1:]) if name[1:] in CONNECTIVES else Token("command", name, in_text=in_text)


def _group(text: str, start: int) -> tuple[str, int]:
    space = _SPACE.match(text, start)
    assert space is not None
    opening = space.end()
    if text[opening : opening + 1] != "{":
        return text[opening : opening + 1], opening + 1
    end = closes_at(text, opening + 1)
    if end < 0:
        raise UnreadableError
    return text[opening + 1 : end], end + 1


def _letters(run: str, known: frozenset[str], in_text: bool) -> list[Token]:
    if run in NAMED or run.lower() == "infinity":
        return [Token("command", NAMED.get(run, "\\infty"), in_text=in_text)]
    if run in FUNCTIONS:
        return [Token("command", f"\\{run}", in_text=in_text)]
    lowered = run.lower()
    if (
        in_text
        or len(run) > LONGEST_PRODUCT
        or lowered in CONNECTIVES | WORDS
        or (len(run) > 1 and not known.isdisjoint({run, lowered}))
    ):
        return [Token("word", run, in_text=in_text)]
    return [Token("letter", letter) for letter in run]
