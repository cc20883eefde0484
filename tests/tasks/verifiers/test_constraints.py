from typing import Any

import pytest

from shoal.tasks import Task, score
from shoal.tasks.verifiers.constraints import CONSTRAINTS
from shoal.tasks.verifiers.registry import find_verifier

KEPT_AND_BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["sea", "fish"]}, "Fish in the sea.", "Fish in the seaside."),
    "keywords:frequency": ({"keyword": "a", "frequency": 2, "relation": "at least"}, "a b a", "a b"),
    "keywords:forbidden_words": ({"forbidden_words": ["shark"]}, "Sharkless sea.", "A shark!"),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "zoo", "zz"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        "One. Two!",
        "One, and 3.5 of it.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen.",
        "First.\n\nNow.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name], [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Hello.\nP.S. Bye.", "Hello P.S. Bye."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 1}, "*here*", "here"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1\na\nPart 2\nb",
        "Part 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "a: 1"),
    "detectable_format:title": ({}, "<<Fish>>\nText", "<< >>\nText"),
    "combination:two_responses": ({}, "a******b", "a******a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, "Say hi. Hi!", "Hi!"),
    "startend:end_checker": ({"end_phrase": "The end."}, "So: the end.", "The end. Or not."),
    "startend:quotation": ({}, '"quoted"', "quoted"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 1, "capital_relation": "at least"},
        "a FISH",
        "a fish",
    ),
    "change_case:english_capital": ({}, "FISH, 2!", "FISh"),
    "change_case:english_lowercase": ({}, "fish, 2!", "Fish"),
    "punctuation:no_comma": ({}, "one two", "one, two"),
}


def scored(name: str, kwargs: dict[str, Any], answer: str) -> float:
    info = {"instruction_id_list": [name], "kwargs": [kwargs]}
    task = Task(problem_id="p", source="t", task_type="instruction_following", prompt="?", verification_info=info)
    result = score(task, f"thinking, with commas</think>\n{answer}\n")
    assert result.exact
    return result.reward


def test_every_constraint_has_an_example() -> None:
    assert KEPT_AND_BROKEN.keys() == CONSTRAINTS.keys()


@pytest.mark.parametrize("name", KEPT_AND_BROKEN)
def test_a_constraint_is_kept_or_broken(name: str) -> None:
    kwargs, kept, broken = KEPT_AND_BROKEN[name]
    assert (scored(name, kwargs, kept), scored(name, kwargs, broken)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"instruction_id_list": ["language:response_language"], "kwargs": [{}]}, "no constraint"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one object of kwargs"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "keywords = None"),
        ({"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": "3"}]}, "num_words"),
        ({"kwargs": []}, "instruction_id_list"),
    ],
)
def test_malformed_constraints_are_refused(info: dict[str, Any], complaint: str) -> None:
    assert complaint in find_verifier("instruction_following").complaint(info)
