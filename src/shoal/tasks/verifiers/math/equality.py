"""From two texts to a verdict: the spelling, the choice letter, the possible readings, the comparison.

An answer that is not wholly readable equals only a ground truth of the same tokens.
"""

import re
from collections.abc import Sequence
from typing import Any

from shoal.tasks.verifiers.math.comparison import Comparison
from shoal.tasks.verifiers.math.expressions import NoValueError
from shoal.tasks.verifiers.math.kinds import Words
from shoal.tasks.verifiers.math.notation import tidy
from shoal.tasks.verifiers.math.reader import read
from shoal.tasks.verifiers.math.tokens import Token, UnreadableError, tokens_of, without_thousands
from shoal.tasks.verifiers.math.units import UNIT_WORDS

_CHOICE = re.compile(r"\(\s*([A-Za-z])\s*\)[.:]?|([A-Z])[.:)]?")
_CHOICE_AND_CONTENT = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])\s*(\S.*)", re.DOTALL)
_OPTION = re.compile(r"(?:option|choice)\s+(?=\(?[A-J]\b)", re.IGNORECASE)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_HEDGE = re.compile(r"\b(?:or|and|not|maybe|either)\b|\([A-J]\)|\b[A-J]\)", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"0[0-9]+")
_LETTERS = re.compile(r"[A-Za-z]{3}")


def is_equal(truth: str, answer: str) -> bool:
    """Raises TooCostlyError where the comparison would take too long."""
    expected, found = (" ".join(tidy(text).split()) for text in (truth, answer))
    if expected == found:
        return True
    choice = _same_choice(expected, found)
    return _same_text(expected, found) if choice is None else choice


def _same_choice(expected: str, found: str) -> bool | None:
    """A letter, with or without what it stands for; None if the ground truth and the answer are not about choices."""
    letter, content = _choice(expected)
    chosen, said = _choice(found)
    if letter and chosen:
        if letter.upper() != chosen.upper():
            return False
        return not said or (_same_text(content, said) if content else _is_plain_content(found, said))
    if letter and content:
        return _same_text(content, found)
    if chosen and said:
        return _same_text(expected, said)
    return None


def _is_plain_content(found: str, said: str) -> bool:
    """What may follow a letter whose meaning is not known: apart from it, and without another choice."""
    apart = re.search(r"[A-Ja-j][).:]*\s+" + re.escape(said[:1]), _TEXT.sub(r"\1", found))
    is_answer = any(meaning is not None for _, meaning in _readings(said, _own_words(said)))
    return bool(apart) and is_answer and not _HEDGE.search(said)


def is_readable(text: str) -> bool:
    """Whether the text is an answer of some kind, and not a sentence."""
    return any(meaning is not None and not _is_sentence(meaning) for _, meaning in _readings(tidy(text), frozenset()))


def _is_sentence(meaning: Any) -> bool:
    return isinstance(meaning, Words) and meaning.text.count(" ") > 1


def _choice(text: str) -> tuple[str, str]:
    flat = _OPTION.sub("", _TEXT.sub(r"\1", text).strip())
    alone = _CHOICE.fullmatch(flat)
    if alone:
        return alone[1] or alone[2], ""
    found = _CHOICE_AND_CONTENT.fullmatch(flat)
    if found is None or found[3].startswith(("=", ",")):
        return "", ""
    return found[1] or found[2], tidy(found[3])


def _same_text(expected: str, found: str) -> bool:
    if _LETTERS.fullmatch(expected) and _LETTERS.fullmatch(found):
        # Three letters may be a word, so their order counts.
        return found in (expected, expected.capitalize(), expected.lower(), expected.upper())
    own_words = _own_words(expected)
    truths, answers = _readings(expected, own_words), _readings(found, own_words)
    if any(_keys(truth) == _keys(answer) for truth, _ in truths for answer, _ in answers):
        return True
    comparison = Comparison()
    return any(
        comparison.same(one, other)
        for _, one in truths
        for _, other in answers
        if one is not None and other is not None
    )


def _own_words(text: str) -> frozenset[str]:
    """The nouns of a ground truth such as 5 zlotys."""
    found = re.findall(r"(?<!\\)\b[A-Za-z][a-z]{2,}", _TEXT.sub(r" \1 ", text))
    return frozenset(word.lower() for word in found)


def _readings(text: str, own_words: frozenset[str]) -> list[tuple[list[Token], Any]]:
    """The tokens and what they mean: with commas as separators of items, and as separators of thousands."""
    merged = without_thousands(text)
    readings = [_reading(text, own_words)]
    if merged != text and _keeps_lists(text, merged):
        readings.append(_reading(merged, own_words))
    return [reading for reading in readings if reading[0]]


def _keeps_lists(text: str, merged: str) -> bool:
    """(1,200) stays a pair: inside brackets commas separate thousands only if another comma separates items."""
    return "," in merged or not any(bracket in text for bracket in "([{")


def _reading(text: str, own_words: frozenset[str]) -> tuple[list[Token], Any]:
    try:
        tokens = tokens_of(text, UNIT_WORDS | own_words)
    except UnreadableError:
        return [], None
    if "," in text and any(_LEADING_ZERO.fullmatch(token.text) for token in tokens):
        return tokens, None  # 1,000 is no list of 1 and 0
    try:
        return tokens, read(tokens, own_words)
    except (UnreadableError, NoValueError):
        return tokens, None


def _keys(tokens: Sequence[Token]) -> list[tuple[str, object]]:
    return [token.key for token in tokens]
