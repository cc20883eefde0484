"""Instruction following: constraints on the form of an answer that a program can check, under the names that IFEval gave them.

`verification_info` holds `instruction_id_list` and `kwargs`, one object per instruction. The answer earns 1 if it keeps all.
Every check is a pure function, linear in the length of the answer; the names of its parameters are those of the dataset.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import model_validator

from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part
from shoal.tasks.verifiers.text import Info, Outcome

Check = Callable[..., bool]
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"')\]]|$)")


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def paragraphs(text: str, separator: str = "\n\n") -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def counts(number: int, relation: str, wanted: int) -> bool:
    """The two relations of the dataset: "at least" and "less than"."""
    return number >= wanted if relation == "at least" else number < wanted


def occurrences(text: str, keyword: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword.lower())}(?!\w)", text.lower()))


def has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(occurrences(text, keyword) for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return counts(occurrences(text, keyword), relation, frequency)


def lacks_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(occurrences(text, word) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return counts(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return counts(len(_SENTENCE_END.findall(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    return len(paragraphs(text, "***")) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    return counts(len(words(text)), relation, num_words)


def first_word_of(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = paragraphs(text)
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    return (
        words(parts[nth_paragraph - 1])[:1] != [] and words(parts[nth_paragraph - 1])[0].lower() == first_word.lower()
    )


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    return any(line.strip().lower().startswith(postscript_marker.lower()) for line in text.splitlines())


def number_bullets(text: str, num_bullets: int) -> bool:
    bullets = [line for line in text.splitlines() if re.match(r"\s*(?:\*(?!\*)|-(?!-))\s*\S", line)]
    return len(bullets) == num_bullets


def one_of_three(text: str) -> bool:
    return any(option in text for option in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def number_highlights(text: str, num_highlights: int) -> bool:
    return len(re.findall(r"\*[^\n*]+\*", text)) >= num_highlights


def number_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def is_json(text: str) -> bool:
    body = text.strip().removeprefix("```json").removeprefix("```Json").removeprefix("```JSON").removeprefix("```")
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def two_responses(text: str) -> bool:
    parts = paragraphs(text, "******")
    return len(parts) == 2 and parts[0] != parts[1]


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return counts(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def all_capitals(text: str) -> bool:
    return text.isupper()


def all_lowercase(text: str) -> bool:
    return text.islower()


def no_comma(text: str) -> bool:
    return "," not in text


CONSTRAINTS: dict[str, tuple[Check, tuple[str, ...]]] = {
    "keywords:existence": (has_keywords, ("keywords",)),
    "keywords:frequency": (keyword_frequency, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (lacks_words, ("forbidden_words",)),
    "keywords:letter_frequency": (letter_frequency, ("letter", "let_frequency", "let_relation")),
    "length_constraints:number_sentences": (number_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (number_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (number_words, ("num_words", "relation")),
    "length_constraints:nth_paragraph_first_word": (first_word_of, ("num_paragraphs", "nth_paragraph", "first_word")),
    "detectable_content:number_placeholders": (number_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (has_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (number_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": (one_of_three, ()),
    "detectable_format:number_highlighted_sections": (number_highlights, ("num_highlights",)),
    "detectable_format:multiple_sections": (number_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (is_json, ()),
    "detectable_format:title": (has_title, ()),
    "combination:two_responses": (two_responses, ()),
    "combination:repeat_prompt": (repeats_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": (ends_with, ("end_phrase",)),
    "startend:quotation": (is_quoted, ()),
    "change_case:capital_word_frequency": (capital_words, ("capital_frequency", "capital_relation")),
    "change_case:english_capital": (all_capitals, ()),
    "change_case:english_lowercase": (all_lowercase, ()),
    "punctuation:no_comma": (no_comma, ()),
}
"""All of IFEval's but response_language, which would need a guess about the language."""
_TEXTS = {"keyword", "letter", "first_word", "postscript_marker", "section_spliter", "prompt_to_repeat", "end_phrase"}
_LISTS = {"keywords", "forbidden_words"}


class ConstraintInfo(Info):
    instruction_id_list: tuple[str, ...]
    kwargs: tuple[dict[str, Any], ...]

    @model_validator(mode="after")
    def _known(self) -> "ConstraintInfo":
        if not self.instruction_id_list or len(self.instruction_id_list) != len(self.kwargs):
            raise ValueError("one object of kwargs is needed for each instruction")
        for name, given in zip(self.instruction_id_list, self.kwargs, strict=True):
            if name not in CONSTRAINTS:
                raise ValueError(f"there is no constraint {name!r}")
            for parameter in CONSTRAINTS[name][1]:
                _check_parameter(name, parameter, given.get(parameter))
        return self


def _check_parameter(name: str, parameter: str, value: object) -> None:
    if parameter in _LISTS:
        good = isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, str) for entry in value)
    elif parameter.endswith("relation"):
        good = value in ("at least", "less than")
    elif parameter in _TEXTS:
        good = isinstance(value, str) and bool(value)
    else:
        good = isinstance(value, int) and not isinstance(value, bool)
    if not good:
        raise ValueError(f"{name} has {parameter} = {value!r}")


def check_constraints(info: ConstraintInfo, text: str) -> Outcome:
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    if not answer.strip():
        return Outcome(0.0, "nothing follows the thinking")
    for name, given in zip(info.instruction_id_list, info.kwargs, strict=True):
        check, parameters = CONSTRAINTS[name]
        if not check(answer.strip(), **{parameter: given[parameter] for parameter in parameters}):
            return Outcome(0.0, f"{name} does not hold")
    return Outcome(1.0, f"all {len(info.kwargs)} constraints hold")
