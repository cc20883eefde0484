"""Answers in everyday writing: number words, times of the day, quantities in several units.

Each reader takes all tokens of an answer or none of them: what is not wholly a time, a number word or such a quantity is None.
"""

from collections.abc import Sequence
from fractions import Fraction

from shoal.tasks.verifiers.math.expressions import number
from shoal.tasks.verifiers.math.kinds import Clock, Quantity, Ratio
from shoal.tasks.verifiers.math.tokens import Token
from shoal.tasks.verifiers.math.units import Unit, read_unit

_SMALL = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "  # noqa: SIM905
        "sixteen seventeen eighteen nineteen".split()
    )
}
_TENS = {
    word: 10 * value
    for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)  # noqa: SIM905
}
_HALVES = {"am": 0, "pm": 720}


def spelled_number(text: str) -> int | None:
    """seven, minus three, twenty one, two hundred five: words below a million, lower case, without hyphens."""
    words = text.split()
    negative = len(words) > 1 and words[0] in ("minus", "negative")
    words = words[1:] if negative else words
    if words.count("thousand") > 1 or not words:
        return None
    thousands, _, rest = " ".join(words).rpartition("thousand")
    above = _below_thousand(thousands.split()) if thousands else 0
    below = _below_thousand(rest.split()) if rest else 0
    if above is None or below is None or (thousands and not above) or ("thousand" in words and not thousands):
        return None
    return (-1 if negative else 1) * (1000 * above + below)


def _below_thousand(words: Sequence[str]) -> int | None:
    if len(words) > 1 and words[1] == "hundred":
        hundreds, rest = _SMALL.get(words[0], 0), _below_hundred(words[2:]) if words[2:] else 0
        return 100 * hundreds + rest if 0 < hundreds < 10 and rest is not None else None
    return _below_hundred(words)


def _below_hundred(words: Sequence[str]) -> int | None:
    if len(words) == 1:
        return _SMALL.get(words[0], _TENS.get(words[0]))
    if len(words) == 2 and words[0] in _TENS and 0 < _SMALL.get(words[1], 0) < 10:
        return _TENS[words[0]] + _SMALL[words[1]]
    return None


def clock(tokens: Sequence[Token]) -> Clock | None:
    """2:30 pm and 2 pm; a time without its half of the day is read as a ratio."""
    half = _HALVES.get(tokens[-1].text.lower()) if tokens[-1].kind == "word" else None
    written = [token.text for token in tokens[:-1]]
    if half is None or not written or not written[0].isdigit() or not 1 <= int(written[0]) <= 12:
        return None
    if len(written) == 1:
        minutes = "00"
    elif len(written) == 3 and written[1] == ":":
        minutes = written[2]
    else:
        return None
    if len(minutes) != 2 or not minutes.isdigit() or int(minutes) > 59:
        return None
    return Clock(int(written[0]) % 12 * 60 + int(minutes) + half)


def is_time_of_day(ratio: Ratio, time: Clock) -> bool:
    """Whether 14:30 is 2:30 pm; 2:30 could be in either half."""
    if len(ratio.parts) != 2 or any(part.op != "number" for part in ratio.parts):
        return False
    hour, minute = (part.value for part in ratio.parts)
    return 60 * hour + minute == time.minutes and (hour > 12 or hour == 0)


def in_several_units(tokens: Sequence[Token]) -> Quantity | None:
    """1 h 30 min, 5 ft 10 in: numbers with units of one dimension, each smaller than the one before and not carried over."""
    if len(tokens) < 4 or len(tokens) % 2 or any(token.kind != "number" for token in tokens[::2]):
        return None
    found = [read_unit([token]) for token in tokens[1::2] if token.kind in ("word", "letter")]
    units = [unit for unit in found if unit is not None and unit.bases]
    if len(units) < len(tokens) // 2 or len({unit.bases for unit in units}) > 1:
        return None
    total, larger = Fraction(0), None
    for token, unit in zip(tokens[::2], units, strict=True):
        if larger is not None and not token.value * unit.factor < larger.factor:
            return None
        total, larger = total + token.value * unit.factor, unit
    return Quantity(number(total), Unit(units[0].bases, Fraction(1)), sure=False)
