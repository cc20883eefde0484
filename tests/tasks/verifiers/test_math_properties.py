"""Rules of equality on generated answers: every rendering of a value is paid for it, no rendering of another value is."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.tasks.verifiers.math.equality import is_equal, is_readable
from shoal.tasks.verifiers.math.expressions import TooCostlyError

pairs = settings(deadline=None, max_examples=40)
whole = st.integers(-(10**7), 10**7)
small = st.integers(1, 99)
signed = st.integers(-99, 99)
fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=400)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def renderings(value: Fraction) -> list[str]:
    """Ways to write a number."""
    sign, size = ("-", -value) if value < 0 else ("", value)
    above, below = size.numerator, size.denominator
    made = [
        f"{sign}\\frac{{{above}}}{{{below}}}",
        f"{sign}{above}/{below}",
        f"${sign}\\dfrac{{{3 * above}}}{{{3 * below}}}$",
    ]
    made += [f"\\frac{{{sign}{above}}}{{{below}}}", f"\\left({sign}{above}/{below}\\right)"]
    if below == 1:
        made += [
            f"{sign}{above}",
            f"{sign}{above}.0",
            f"{sign}{above:,}",
            f"{sign}{above:,}".replace(",", "{,}"),
            f"{sign}{above}.",
        ]
        made += [
            f"{sign}{above:,}".replace(",", "\\,"),
            f"−{above}" if sign else f"+{above}",
            f"\\text{{{sign}{above}}}",
        ]
        made += [f"{sign}{above}e0", f"{sign}{above} \\times 10^{{0}}", f"{sign}0{above}"]
    elif above > below:
        made += [
            f"{sign}{above // below}\\frac{{{above % below}}}{{{below}}}",
            f"{sign}{above // below} {above % below}/{below}",
        ]
    if not _has_other_primes(below):
        decimal = _decimal(size)
        made += [
            f"{sign}{decimal}",
            f"{sign}{decimal}00",
            f"{sign}{decimal}e0",
            f"{sign}{decimal.lstrip('0')}",
            f"{_decimal(100 * value)}\\%",
        ]
    return made


def _has_other_primes(number: int) -> bool:
    for prime in (2, 5):
        while number % prime == 0:
            number //= prime
    return number != 1


def _decimal(value: Fraction) -> str:
    places = next(places for places in range(64) if (value * 10**places).denominator == 1)
    digits = f"{abs(int(value * 10**places)):0{places + 1}d}"
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[: len(digits) - places]}.{digits[len(digits) - places :] or '0'}"


def shown(value: int) -> str:
    return f"+{value}" if value >= 0 else str(value)


@pairs
@given(st.one_of(whole.map(Fraction), fractions), st.data())
def test_every_rendering_of_a_number_is_the_number(value: Fraction, data: st.DataObject) -> None:
    forms = renderings(value)
    truth, answer = (
        data.draw(st.sampled_from([form for form in forms if "%" not in form])),
        data.draw(st.sampled_from(forms)),
    )
    assert is_equal(truth, answer)
    assert is_equal(truth, f"x = {answer}")
    assert is_equal(f"x={truth}", answer)


@pairs
@given(st.one_of(whole.map(Fraction), fractions), st.one_of(whole.map(Fraction), fractions), st.data())
def test_no_rendering_of_another_number_is(value: Fraction, other: Fraction, data: st.DataObject) -> None:
    other = data.draw(
        st.sampled_from(
            [other, -value, value + 1, value / 10, value * 10, value + Fraction(1, 1000), 1 / value if value else other]
        )
    )
    assume(value != other)
    truth = data.draw(st.sampled_from([form for form in renderings(value) if "%" not in form]))
    answer = data.draw(st.sampled_from([form for form in renderings(other) if "%" not in form]))
    assert not is_equal(truth, answer)


PAIRED = ["{} or {}", "{}, {}", "{} and {}", "{} {}", "{};{}", "{} \\text{{ or }} {}", "\\{{{},{}\\}}", "({},{})", "[{},{}]",
          "{}={}", "{} (or maybe {})", "{} \\to {}", "{} < {}", "either {} or {}", "{} \\pm {}", "{}:{}:1"]  # fmt: skip


@pairs
@given(fractions, fractions, st.sampled_from(PAIRED))
def test_two_numbers_are_never_one(value: Fraction, other: Fraction, form: str) -> None:
    assume(value != other and other != 0)
    assert not is_equal(str(value), form.format(value, other))
    assert not is_equal(str(value), form.format(other, value))


@pairs
@given(st.lists(fractions, min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_lists_and_sets_are_all_their_items_in_any_order(values: list[Fraction], random: object) -> None:
    items = [str(value) for value in values]
    mixed = list(items)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    truth = ", ".join(items)
    for answer in (
        ", ".join(mixed),
        "\\{" + ",".join(mixed) + "\\}",
        ", ".join(f"x={item}" for item in mixed),
        " and ".join(mixed),
    ):
        assert is_equal(truth, answer)
        assert is_equal("\\{" + truth + "\\}", answer)
    for answer in (
        ", ".join(items[1:]),
        ", ".join([*items, "1001"]),
        ", ".join([*items, items[0]]),
        f"({', '.join(items)})",
        items[0],
    ):
        assert not is_equal(truth, answer)
    assert not is_equal(truth, ", ".join([*items[1:], str(values[0] + Fraction(1, 7))]))


@pairs
@given(st.lists(signed, min_size=2, max_size=5), st.data())
def test_tuples_keep_their_order(values: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(values))
    truth = f"({','.join(map(str, values))})"
    assert is_equal(truth, f"\\left( {' , '.join(f'{value}.0' for value in values)} \\right)")
    assert is_equal(truth, f"({', '.join(map(str, other))})") == (list(other) == values)
    assert not is_equal(truth, f"({','.join(map(str, [*values, 0]))})")
    assert not is_equal(truth, ", ".join(map(str, values)))


def interval(low: int, high: int, opening: str, closing: str) -> list[str]:
    left, right = "<" if opening == "(" else "\\le", "<" if closing == ")" else "≤"
    return [
        f"{opening}{low},{high}{closing}", f"\\left{opening}{low}.0, {high}\\right{closing}", f"{low}{left} x {right}{high}",
        f"x \\in {opening}{low},{high}{closing}", f"x {'>' if left == '<' else '≥'} {low} and x {right} {high}",
        f"{opening}{low},{high - 1}] \\cup ({high - 1},{high}{closing}",
    ]  # fmt: skip


@pairs
@given(
    signed,
    st.integers(2, 50),
    st.sampled_from("(["),
    st.sampled_from(")]"),
    st.sampled_from("(["),
    st.sampled_from(")]"),
    st.data(),
)
def test_intervals_are_their_ends_and_brackets(
    low: int, size: int, opening: str, closing: str, other_opening: str, other_closing: str, data: st.DataObject
) -> None:
    truth, answer = (data.draw(st.sampled_from(interval(low, low + size, opening, closing))) for _ in range(2))
    assert is_equal(truth, answer)
    shift = data.draw(st.sampled_from([0, 1]))
    other = data.draw(st.sampled_from(interval(low, low + size + shift, other_opening, other_closing)))
    assert is_equal(truth, other) == ((opening, closing, 0) == (other_opening, other_closing, shift))


@pairs
@given(
    signed, st.sampled_from(["<", "\\le", ">", "\\ge"]), st.sampled_from(["<", "\\le", ">", "\\ge"]), st.integers(2, 9)
)
def test_inequalities_are_their_direction_bound_and_strictness(bound: int, sign: str, other: str, factor: int) -> None:
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
    ends = {
        "<": f"(-\\infty,{bound})",
        "\\le": f"(-\\infty,{bound}]",
        ">": f"({bound},\\infty)",
        "\\ge": f"[{bound},\\infty)",
    }
    for answer in (
        f"{bound} {turned[sign]} x",
        f"-x {turned[sign]} {-bound}",
        ends[sign],
    ):
        assert is_equal(f"x {sign} {bound}", answer)
    assert is_equal(f"x {sign} {bound}", f"x {other} {bound}") == (sign == other)
    assert is_equal(f"x {sign} {bound}", ends[other]) == (sign == other)
    assert not is_equal(f"x {sign} {bound}", f"x {sign} {bound + 1}")
    assert not is_equal(f"x {sign} {bound}", f"y {sign} {bound}")
    assert not is_equal(f"x {sign} {bound}", str(bound))
    assert not is_equal(f"x {sign} {bound}", f"{factor}x {sign} {factor * bound}")
    assert not is_equal(f"x = {bound}", f"{factor}x = {factor * bound}")


@pairs
@given(signed, signed, st.integers(2, 9), st.data())
def test_lines_are_equal_up_to_a_factor(slope: int, start: int, factor: int, data: st.DataObject) -> None:
    truth = f"y = {slope}x {shown(start)}"
    for answer in (f"y={shown(start)}{shown(slope)}x", f"{factor}y = {factor * slope}x {shown(factor * start)}",
                   f"{slope}x - y {shown(start)} = 0", f"y {shown(-start)} = {slope}x"):  # fmt: skip
        assert is_equal(truth, answer)
    other_slope, other_start = data.draw(
        st.sampled_from([(slope + 1, start), (slope, start + 1), (-slope, start), (slope, -start), (start, slope)])
    )
    assume((other_slope, other_start) != (slope, start))
    for answer in (
        f"y={other_slope}x{shown(other_start)}",
        f"{other_slope}x-y{shown(other_start)}=0",
        f"{other_slope}x{shown(other_start)}",
    ):
        assert not is_equal(truth, answer)


@pairs
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4), st.data())
def test_polynomials_are_equal_in_every_order_and_factored(roots: list[int], data: st.DataObject) -> None:
    coefficients = [1]
    for root in roots:
        coefficients = [
            (coefficients[place] if place < len(coefficients) else 0) - root * (coefficients[place - 1] if place else 0)
            for place in range(len(coefficients) + 1)
        ]
    powers = list(enumerate(reversed(coefficients)))
    factored = "".join(f"(x{shown(-root)})" for root in data.draw(st.permutations(roots)))
    written = "".join(f"{shown(coefficient)}x^{{{power}}}" for power, coefficient in data.draw(st.permutations(powers)))
    assert is_equal(factored, written)
    assert is_equal(written, factored)
    changed = data.draw(
        st.sampled_from([f"{written}+1", f"{factored}x", f"2{factored}", f"-{factored}", written.replace("x", "y")])
    )
    assert not is_equal(factored, changed)
    assert not is_equal(written, changed)


UNITS = {"m": Fraction(1), "cm": Fraction(1, 100), "km": Fraction(1000), "mm": Fraction(1, 1000), "kg": None, "s": None}


@pairs
@given(
    small,
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", "^2", "^3"]),
    st.sampled_from(["", "^2", "^3"]),
)
def test_quantities_need_their_unit_and_power(value: int, unit: str, other: str, power: str, other_power: str) -> None:
    truth = f"{value}\\text{{ {unit}}}{power}"
    assert is_equal(truth, f"{value}.0 \\mathrm{{{unit}}}{power}")
    assert is_equal(truth, f"{value} {unit}{power}")
    assert is_equal(truth, f"{value} {other}{other_power}") == ((unit, power) == (other, other_power))
    assert not is_equal(truth, f"{value + 1} {unit}{power}")
    scale, target = UNITS[unit], UNITS[other]
    if scale and target and not power:
        assert is_equal(truth, f"{value * scale / target} \\text{{ {other}}}")


@pairs
@given(st.integers(16, 10**6), st.integers(2, 16), st.integers(2, 16))
def test_numbers_in_a_base_need_their_base(value: int, base: int, other: int) -> None:
    def written(number: int, radix: int) -> str:
        digits = ""
        while number:
            number, digit = divmod(number, radix)
            digits = DIGITS[digit] + digits
        return digits

    truth = f"{written(value, base)}_{{{base}}}"
    assert is_equal(truth, f"\\text{{{written(value, base).upper()}}}_{{{base}}}")
    assert not is_equal(truth, f"{written(value + 1, base)}_{{{base}}}")
    assert is_equal(truth, f"{written(value, other)}_{{{other}}}") == (base == other)


@pairs
@given(st.integers(1, 10**7), st.integers(0, 99), st.data())
def test_money_is_its_amount_and_currency(dollars: int, cents: int, data: st.DataObject) -> None:
    truth = f"\\${dollars:,}.{cents:02d}"
    assert is_equal(truth, f"{dollars}.{cents:02d}")
    assert is_equal(truth, f"\\${dollars}.{cents:02d}0")
    assert is_equal(truth, f"{100 * dollars + cents} cents")
    for answer in (
        f"€{dollars}.{cents:02d}",
        f"\\${dollars + 1}.{cents:02d}",
        f"{dollars}.{cents:02d} cents",
        f"\\${dollars}.{cents:02d} million",
    ):
        assert not is_equal(truth, answer)


@pairs
@given(st.integers(1, 999), st.integers(2, 4))
def test_percentages_are_their_value(value: int, factor: int) -> None:
    for answer in (
        f"{value}%",
        f"{value}.0\\%",
        f"\\frac{{{value}}}{{100}}",
        str(Fraction(value, 100)),
        f"{value} percent",
    ):
        assert is_equal(f"{value}\\%", answer)
    assert is_equal(str(Fraction(value, 100)), f"{value}\\%")
    for answer in (f"{factor * value}%", f"{value}0%", f"0.{value:03d}%", f"{value} cm", f"\\${value}"):
        assert not is_equal(f"{value}\\%", answer)
    assert not is_equal(str(value), f"{value}\\%")


@pairs
@given(st.lists(st.lists(signed, min_size=2, max_size=3), min_size=2, max_size=3), st.data())
def test_matrices_are_all_their_cells(rows: list[list[int]], data: st.DataObject) -> None:
    width = min(map(len, rows))
    rows = [row[:width] for row in rows]

    def written(cells: list[list[int]], name: str) -> str:
        return f"\\begin{{{name}}}" + " \\\\ ".join(" & ".join(map(str, row)) for row in cells) + f"\\end{{{name}}}"

    truth = written(rows, "pmatrix")
    assert is_equal(truth, written(rows, "bmatrix"))
    assert is_equal(truth, str(rows))
    changed = [list(row) for row in rows]
    changed[data.draw(st.integers(0, len(rows) - 1))][data.draw(st.integers(0, width - 1))] += 1
    assert not is_equal(truth, written(changed, "pmatrix"))
    turned = [list(column) for column in zip(*rows, strict=True)]
    assert is_equal(truth, written(turned, "pmatrix")) == (turned == rows)


@pairs
@given(st.sampled_from("ABCDE"), st.sampled_from("ABCDE"), signed)
def test_choices_are_their_letter(letter: str, other: str, value: int) -> None:
    truth = f"\\textbf{{({letter})}}\\ {value}"
    for answer in (letter, f"({letter})", f"\\text{{{letter}}}", f"{letter}) {value}", str(value)):
        assert is_equal(truth, answer)
    assert is_equal(truth, f"({other})") == (letter == other)
    for answer in (f"({letter}) {value + 1}", f"{letter} or {other}", f"({letter}), ({other})", str(value + 1)):
        assert not is_equal(truth, answer)


PIECES = [*"0123456789xyn+-*/^_=<>()[]{}|,.;:!%$ \\\ud7ff½²√", "\\frac", "\\sqrt", "\\text{", "\\begin{pmatrix}", "\\end{pmatrix}",
          "\\cup", "\\infty", "\\left", "\\{", " or ", " cm", "\\pi", "\\pm", "\\sin",
          "\\overline{", "\\boxed{", "e9", "..."]  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_no_text_raises_anything_and_only_readable_ones_equal_other_texts(text: str) -> None:
    try:
        is_equal("12345", text)
        is_equal(text, "12345")
        assert is_equal("12345", text) <= is_readable(text)
    except TooCostlyError:
        pytest.fail("sixty characters cannot cost that much")
