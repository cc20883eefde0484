"""Units of measure: what can follow a number, as a product of base units with an exact factor.

500 cm are 5 m, 1 km/h is no m/s, and 5 apples are no 5 oranges: words that are not units of measure only equal themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal.tasks.verifiers.math.notation import names
from shoal.tasks.verifiers.math.tokens import Token

_METRIC = """
m 1 meter metre
g 1 gram
m^3 1/1000 liter litre
"""
_PREFIXES = """
1 - -
1000 k kilo
1/10 d deci
1/100 c centi
1/1000 m milli
"""
_OTHERS = """
m 127/5000 in inch inches
m 381/1250 ft foot feet
m 1143/1250 yd yard yards
m 201168/125 mi mile miles
g 45359237/100000 lb lbs pound pounds
g 45359237/1600000 oz ounce ounces
s 1 s sec secs second seconds
s 1/1000 ms
s 60 min mins minute minutes
s 3600 h hr hrs hour hours
s 86400 day days
s 604800 week weeks
month 1 month months
month 12 yr yrs year years
m/s 5/18 kph kmh
m/s 1397/3125 mph
dollar 1 $ dollar dollars usd
dollar 1/100 \\cent cent cents
euro 1 \\euro euro euros eur
sterling 1 \\pound gbp
yen 1 \\yen yen jpy
rupee 1 \\rupee rs rupee rupees
degree 1 \\degree deg degree degrees
radian 1 rad radian radians
newton 1 N newton newtons
joule 1 J joule joules
watt 1 W watt watts
volt 1 V volt volts
hertz 1 Hz hertz
mole 1 mol mole moles
ton 1 ton tons
acre 1 acre acres
gallon 1 gal gallon gallons
unit 1 unit units
1 12 dozen
1 100 hundred
1 1000 thousand
1 1000000 million
1 1000000000 billion
"""
"""Base, factor, names."""
_COUNTED = names("""apple ball bag bird block book bottle box boy bus car card case cat chair child coin combination cookie cube
    cup customer digit dog edge egg element employee face factor fish flower friend game girl goal group guest hat
    integer kid letter line man marble member method minute number orange outcome page pair path pattern pen
    pencil people permutation person piece pizza place player point pound prime problem question ratio rectangle
    root row sandwich seat set shirt side slice solution song square stamp step sticker student subset sweet team
    term ticket tile time toy tree triangle trip value vertex vote way week woman word worker zero""")
_PLURALS = {"children": "child", "men": "man", "women": "woman", "people": "person", "vertices": "vertex"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_BETWEEN = frozenset({"/", "per", "\\times", "*", "-"})
_BASES: dict[str, dict[str, int]] = {"m^3": {"m": 3}, "m/s": {"m": 1, "s": -1}, "1": {}}


@dataclass(frozen=True)
class Unit:
    bases: tuple[tuple[str, int], ...]
    factor: Fraction


def _table() -> dict[str, tuple[str, Fraction]]:
    found = {word: (f"#{noun}", Fraction(1)) for noun in _COUNTED for word in (noun, f"{noun}s", f"{noun}es")}
    found |= {word: (f"#{noun}", Fraction(1)) for word, noun in _PLURALS.items()}
    for base, factor, *spelled in map(str.split, _METRIC.strip().splitlines()):
        for size, short, long in map(str.split, _PREFIXES.strip().splitlines()):
            letters = {"m^3": ("l", "L")}.get(base, (base,))
            words = [long.strip("-") + name + plural for name in spelled for plural in ("", "s")]
            value = base, Fraction(factor) * Fraction(size)
            found |= dict.fromkeys([*(short.strip("-") + letter for letter in letters), *words], value)
    for base, factor, *spelled in map(str.split, _OTHERS.strip().splitlines()):
        found |= dict.fromkeys(spelled, (base, Fraction(factor)))
    return found


UNITS = _table()
UNIT_WORDS = frozenset(name for name in UNITS if name.isalpha()) | _POWERS.keys() | {"per", "percent"}


def read_unit(tokens: Sequence[Token], own_words: frozenset[str] = frozenset()) -> Unit | None:
    """A product of units with whole powers; None for anything else. `own_words` are further nouns that may be counted."""
    if tokens and tokens[0].text == "\\frac":
        return _fraction(tokens, own_words)
    powers: dict[str, int] = {}
    factor, sign, prefix, position, complete = Fraction(1), 1, 1, 0, False
    while position < len(tokens):
        text = tokens[position].text.lower() if tokens[position].kind == "word" else tokens[position].text
        if text in _BETWEEN or text in _POWERS:
            if (text in _BETWEEN) != complete and text not in _POWERS:
                return None
            sign, prefix = (-1 if text in ("/", "per") else sign), _POWERS.get(text, 1)
            position, complete = position + 1, False
            continue
        found, exponent = _lookup(tokens[position], own_words), _exponent(tokens, position + 1)
        if found is None or exponent is None:
            return None
        power, position, complete = sign * prefix * exponent[0], exponent[1], True
        powers[found[0]] = powers.get(found[0], 0) + power
        factor *= found[1] ** power
        prefix = 1
    return _made(powers, factor) if complete else None


def _fraction(tokens: Sequence[Token], own_words: frozenset[str]) -> Unit | None:
    """\\frac{m}{s^2}."""
    texts = [token.text for token in tokens]
    between = next((place for place in range(len(texts)) if texts[place : place + 2] == ["}", "{"]), 0)
    if not between or texts[1] != "{" or texts[-1] != "}":
        return None
    above, below = (read_unit(part, own_words) for part in (tokens[2:between], tokens[between + 2 : -1]))
    if above is None or below is None:
        return None
    powers = dict(above.bases)
    for base, power in below.bases:
        powers[base] = powers.get(base, 0) - power
    return _made(powers, above.factor / below.factor)


def _lookup(token: Token, own_words: frozenset[str]) -> tuple[str, Fraction] | None:
    if token.text in UNITS:
        return UNITS[token.text]
    lowered = token.text.lower()
    if token.kind != "word":
        return None
    # Mm are no mm: a capital M is another prefix.
    if lowered in UNITS and len(lowered) > 1 and not (token.text[0] == "M" and len(lowered) == 2):
        return UNITS[lowered]
    return (f"#{lowered.removesuffix('s')}", Fraction(1)) if lowered in own_words else None


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int, int] | None:
    """The whole power after ^, from -3 to 3, and where it ends; 1 without one, None for any other."""
    if position >= len(tokens) or tokens[position].text != "^":
        return 1, position
    texts = [token.text for token in tokens[position + 1 : position + 5]]
    braced = texts[:1] == ["{"]
    inside = texts[1 : texts.index("}")] if braced and "}" in texts else texts[:1]
    written = "".join(inside)
    if written.removeprefix("-") not in ("1", "2", "3"):
        return None
    return int(written), position + 1 + len(inside) + 2 * braced


def _made(powers: dict[str, int], factor: Fraction) -> Unit:
    """Litres are powers of a length; powers that cancel are gone."""
    bases: dict[str, int] = {}
    for name, power in powers.items():
        for base, times in _BASES.get(name, {name: 1}).items():
            bases[base] = bases.get(base, 0) + power * times
    return Unit(tuple(sorted((base, power) for base, power in bases.items() if power)), factor)
