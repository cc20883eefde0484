"""Words that were retired stay out of code, messages, tests and docs. Each entry names the word to use instead.

A word is found in prose and inside identifiers: `told` in `told_at` and in `ToldError`, but not in `untold`. What is legitimate
is listed beside the word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = {".py", ".md", ".toml", ".html", ".sh"}
SKIPPED = {"tests/test_words.py", "docs/assets", "build", ".venv"}


@dataclass(frozen=True)
class Retired:
    """A word as a pattern, what to write instead, and contexts in which it stays."""

    word: str
    instead: str
    allowed: str = r"(?!)"
    exact: bool = False
    """Only this name, whole and in this case."""

    def found(self, text: str) -> list[str]:
        flags, part = (re.NOFLAG, r"\w") if self.exact else (re.IGNORECASE, "[A-Za-z]")
        rest = re.sub(self.allowed, " ", text, flags=flags)
        return [match.group() for match in re.finditer(rf"(?<!{part})(?:{self.word})(?!{part})", rest, flags)]


RETIRED = (
    Retired("rooms?", "package, buffer, capacity", r"(no|make|is|without|enough)[ _]room|no[ _-]?room|room for"),
    Retired("told", "reported"),
    Retired("dear", "expensive"),
    Retired("whoever", "new workers, anyone who"),
    Retired("blam(e|es|ed|ing|eless)", "the worker is (not) penalised"),
    Retired("figures", "metrics, numbers", r"figures\.json"),
    Retired("judg(e|es|ed|ing|ements?|ments?)", "score, verify, validate", r"llm_judge\w*|understanding_judge"),
    Retired("near[- ]ties?", "rounding flip"),
    Retired("sure polic(y|ies)", "low-entropy policy"),
    Retired("arithmetics?", "numerics", r"(basic|chain_sum|decimal)_arithmetic|arithmetic (mean|tasks?|problems?)"),
    Retired("anchors?", "keyframe", r"bbox_to_anchor|text-anchor"),
    Retired("standing", "trust state", r"(long|free)[- ]standing"),
    Retired("show(s|ed|n|ing)?[ _](life|that it lives)", "send a heartbeat"),
    Retired("g(i|a)ve[sn]?[ _]up|giving[ _]up", "mark as gone, stop waiting"),
    Retired("set(s|ting)?[ _]aside", "quarantine"),
    Retired("stands?[ _]in", "is recorded in"),
    Retired("anew", "again"),
    Retired("so many", "N"),
    Retired("the short way", "dispatch"),
    Retired("parcels?", "transfer"),
    Retired("twins?", "duplicates"),
    Retired("farewells?|bury|buried|hopeless", "a plain word"),
    Retired("near and dear|says nothing about", "a plain sentence"),
    Retired("Mailbox|Letter|Express|RelayBook|Arrivals|Judges|LearnedJudge|Bell", "LoopResults …", exact=True),
    Retired("FusedBody|TransformersBody|heaviest|others_work|welcome_back|lost_margins", "the new name", exact=True),
    Retired("spread_masters|anchor_every|max_tries_s", "the new name", exact=True),
)


def spaced(text: str) -> str:
    """CamelCase as words, so that a retired word is found inside a name."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)


def areas() -> dict[str, list[Path]]:
    """The files of each package, test package and folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*")):
        name = str(path.relative_to(ROOT))
        if path.suffix not in TEXT or name.startswith((".", *SKIPPED)) or not path.is_file():
            continue
        found.setdefault(area_of(path.relative_to(ROOT)), []).append(path)
    return found


def area_of(path: Path) -> str:
    depth = 3 if path.parts[0] == "src" else 2 if path.parts[0] == "tests" else 1
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or "top level"


def retired_words(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        for retired in RETIRED:
            searched = line if retired.exact else spaced(line)
            for word in retired.found(searched):
                yield f"{path.relative_to(ROOT)}:{number}: {word} → {retired.instead}"


AREAS = areas()


@pytest.mark.parametrize("area", AREAS)
def test_retired_words_stay_out(area: str) -> None:
    found = [word for path in AREAS[area] for word in retired_words(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_retired"),
    [
        ("whoever joins", True),
        ("the worker is told", True),
        ("told_at", True),
        ("an untold story", False),
        ("make room for it", False),
        ("a torch-free room", True),
        ("class WorkerJudge", True),
        ("outstanding leases", False),
        ("its standing", True),
        ("the file is set aside", True),
        ("basic_arithmetic", False),
        ("others_work = 1", True),
        ("while_others_work", False),
    ],
)
def test_a_retired_word_is_found_in_prose_and_names(text: str, is_retired: bool) -> None:
    assert any(retired.found(spaced(text)) for retired in RETIRED) is is_retired
