"""Spelling: one notation for the many ways to type the same mathematics, before anything is read.

Unicode becomes LaTeX commands, LaTeX variants become one spelling, delimiters around the whole answer go. Nothing here changes
what an answer means, and nothing evaluates it. Linear in the length of the text.
"""

import re
import unicodedata


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ", "0123456789+-()nx", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_FRACTION_CHARACTER = re.compile("[¼½¾⅐-⅞↉]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\u00ad]")
_BEFORE_NFKC = str.maketrans({
    "º": "°", "˚": "°", "′": "'", "″": "''", "‐": "-", "‑": "-", "‒": "-", "–": "-", "—": "-", "∶": ":",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
})  # fmt: skip
_DIGIT = re.compile(r"\d")
_CHARACTERS = {
    "−": "-", "﹣": "-", "×": "\\times ", "·": "\\times ", "⋅": "\\times ", "∙": "\\times ", "•": "\\times ", "∗": "*",
    "÷": "/", "∕": "/", "⁄": "/", "≤": "\\leq ", "⩽": "\\leq ", "≥": "\\geq ", "⩾": "\\geq ", "≠": "\\neq ",
    "≈": "\\approx ", "∞": "\\infty ", "√": "\\sqrt ", "∛": "\\cuberoot ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "∅": "\\emptyset ", "∖": "\\setminus ", "±": "\\pm ", "∓": "\\mp ", "°": "\\degree ", "∠": "\\angle ",
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "∧": "\\land ", "∨": "\\lor ", "…": "\\ldots ", "€": "\\euro ", "£": "\\pound ", "¥": "\\yen ", "¢": "\\cent ", "₹": "\\rupee ",
    "“": '"', "”": '"', "‘": "'", "’": "'",
    **{chr(code): f"\\{unicodedata.name(chr(code)).split()[-1].lower()} " for code in (*range(0x3B1, 0x3C2), *range(0x3C3, 0x3CA))},
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)

_SPELLINGS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "le": "leq", "leqslant": "leq", "leqq": "leq", "lt": "less", "ge": "geq", "geqslant": "geq", "geqq": "geq", "gt": "greater",
    "ne": "neq", "not=": "neq", "cdot": "times", "ast": "times", "div": "divided", "varnothing": "emptyset",
    "lbrace": "{", "rbrace": "}", "lbrack": "lbracket", "rbrack": "rbracket",
    "bar": "overline", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "backslash": "setminus",
    "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "arcsec": "asec", "lvert": "vert", "rvert": "vert",
    "wedge": "land", "vee": "lor", "euros": "euro", "pounds": "pound", "textdollar": "$", "degrees": "degree",
    "textbf": "text", "textrm": "text", "textit": "text", "textsf": "text", "texttt": "text", "mathrm": "text",
    "mbox": "text", "hbox": "text", "emph": "text", "mathsf": "text", "operatorname": "text", "textnormal": "text",
    "mathbf": "letter", "boldsymbol": "letter", "mathit": "letter", "bm": "letter", "mathcal": "letter", "vec": "letter",
    "underline": "letter",
    "fbox": "boxed",
}  # fmt: skip
_DROPPED = names(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr "
    "Biggl Biggr displaystyle textstyle scriptstyle limits nolimits tiny small normalsize large Large LARGE huge Huge"
)
_SPACES = names("quad qquad enspace thinspace medspace thickspace space hspace")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_REALS = re.compile(r"\\mathbb\s*(?:R(?![A-Za-z])|\{\s*R\s*\})")
_SURE_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\!,|,\\!|\\,)(?=[0-9]{3}(?![0-9]))")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose([^{}]*)\}")
_TYPED = (
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<=[\w)}])\s*\*\*\s*(?=[\w({\\-])"), "^"),
    (re.compile(r"(?<=[0-9\s{])([aApP])\.\s?([mM])\.?(?![A-Za-z])"), r"\1\2"),
    (re.compile(r"\A\s*(?:minus|negative)\s+(?=[0-9.(\\])", re.IGNORECASE), "-"),
    (re.compile(r"\+\s?/\s?-"), r"\\pm "),
    (re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)"), r"\\times "),
    (re.compile(r"(?<=[)\]])\s?U\s?(?=[(\[])"), r"\\cup "),
    (re.compile(r">="), r"\\geq "),
    (re.compile(r"<="), r"\\leq "),
    (re.compile(r"(?<=\s)!="), r"\\neq "),
)
_INNER_DOLLARS = re.compile(r"(?<!\\)\$([^$\s\\](?:[^$]*[^$\s\\])?|\\[^$]*[^$\s\\])\$(?![0-9A-Za-z\\])")
_OPEN_ENDS = re.compile(r"([\[\]])([^\[\](),;]+[,;][^\[\](),;]+)([\[\]])")
_PROGRAMMED = re.compile(r"\s*0([bBoOxX])([0-9A-Fa-f]+)\s*\Z")
_PROGRAMMED_BASES = {"b": 2, "o": 8, "x": 16}
_FULL_STOP = re.compile(r"(?<!\.)\.$")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'))


def tidy(text: str) -> str:
    """The same answer in one spelling."""
    return _unwrapped(_latex(_plain(text.removesuffix("\\"))))


def _plain(text: str) -> str:
    text = _INVISIBLE.sub("", text).translate(_BEFORE_NFKC)
    text = _FRACTION_CHARACTER.sub(_as_fraction, text)
    text = _RAISED.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[mark] for mark in run.group()) + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + "".join(_SUBSCRIPTS[mark] for mark in run.group()) + "}", text)
    text = unicodedata.normalize("NFKC", text).translate(_TRANSLATION)
    text = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit.group())), text)
    programmed = _PROGRAMMED.match(text)
    return _with_base(programmed) if programmed else text


def _as_fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found.group()).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"


def _latex(text: str) -> str:
    text = _DEGREE.sub(r"\\degree ", _REALS.sub(r"\\reals ", _SURE_THOUSANDS.sub("", _COLOUR.sub("", text))))
    text = text.replace("{,}", ",")
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _INNER_DOLLARS.sub(r"\1", text)).replace("{}", "")
    for typed, spelled in _TYPED:
        text = typed.sub(spelled, text)
    return _COMMAND.sub(_respelled, _OPEN_ENDS.sub(_with_round_brackets, text))


def _with_round_brackets(found: re.Match[str]) -> str:
    """]1,2] is (1,2]."""
    opening, inner, closing = found.groups()
    return f"{'(' if opening == ']' else '['}{inner}{')' if closing == '[' else ']'}"


def _with_base(found: re.Match[str]) -> str:
    return f"{found[2]}_{{{_PROGRAMMED_BASES[found[1].lower()]}}}"


def _respelled(found: re.Match[str]) -> str:
    name = found.group(1)
    if name in _DROPPED or name == "!":
        return ""
    if name in _SPACES or name in (",", ";", ":", " ", ">", "\n"):
        return " "
    if name in ("(", ")", "[", "]", "&", "#", "_"):
        return found.group() if name in "()[]" else name
    spelled = _SPELLINGS.get(name, name)
    return {"divided": "/", "less": "<", "greater": ">", "lbracket": "[", "rbracket": "]", "vert": "|"}.get(
        spelled, f"\\{spelled}" + (" " if spelled.isalpha() else "")
    )


def _unwrapped(text: str) -> str:
    """Without what is written around a whole answer: math delimiters, a box, bold marks, a full stop."""
    while True:
        before, text = text, _FULL_STOP.sub("", text.strip()).strip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : -len(closing)]
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and inner.strip()
                and opening not in inner.replace("\\$", "")
            ):
                text = inner
                break
        for prefix in ("\\boxed {", "{"):
            if text.startswith(prefix) and closes_at(text, len(prefix)) == len(text) - 1:
                text = text[len(prefix) : -1]
        if text == before:
            return text


def closes_at(text: str, start: int) -> int:
    """Where the brace that was opened before `start` is closed; -1 if nowhere."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if not depth:
            return found.start()
    return -1
