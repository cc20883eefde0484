"""Tasks in the manner of AIME, GPQA, IFEval and LiveCodeBench, from local files to metrics."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.config import TasksConfig
from shoal.evaluation import AnswerGenerator, AnswerMetrics, SamplingSettings, metrics_by_category
from shoal.policy import Completion, GenerationRequest, bundled_directory
from shoal.tasks import TextCodec
from shoal.tasks.sources import tasks_to_measure

DATA = Path(__file__).parent / "data"
CODEC = TextCodec.from_directory(bundled_directory())
SUM = "```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```"
PALINDROME = "```python\ndef is_palindrome(text):\n    return text.lower() == text.lower()[::-1]\n```"
ANSWERS = {
    "aime": {"divisible by 7": ("71", "142"), "legs 20": ("so \\boxed{70}", "so \\boxed{29}")},
    "gpqa": {"strong": ("The answer is (B)", "The answer is (A)"), "adenine": ("\\boxed{D}", "it depends")},
    "ifeval": {
        "the sea": ("the sea is wide and blue and always in motion", "wide, blue"),
        "small letters": ("it was a calm day and that is the end", "It was a calm day. The end"),
    },
    "livecodebench": {
        "Print their sum": (SUM, "```python\nprint(6)\n```"),
        "is_palindrome": (PALINDROME, "```python\ndef is_palindrome(text):\n    return True\n```"),
    },
}
"""By a part of the prompt: a right and a wrong answer."""


class Reciter:
    """An engine that knows the answers by heart: the first sample is right, the second wrong."""

    numerics_class = "none"

    def __init__(self, answers: dict[str, tuple[str, str]]) -> None:
        self.answers, self.asked = answers, dict[tuple[int, ...], int]()

    def generate(self, requests: Sequence[GenerationRequest], **options: Any) -> list[Completion]:
        return [self._recite(request.prompt_tokens) for request in requests]

    def _recite(self, prompt: tuple[int, ...]) -> Completion:
        turn = self.asked.setdefault(prompt, 0)
        self.asked[prompt] += 1
        text = next(pair[turn] for part, pair in self.answers.items() if part in CODEC.decode(prompt))
        return Completion(tokens=[*CODEC.encode(f"hm</think>{text}"), CODEC.eos_token_ids[0]], finish_reason="stop")


def measured(name: str) -> list[AnswerMetrics]:
    engine: Any = Reciter(ANSWERS[name])
    tasks = tasks_to_measure(TasksConfig(source=str(DATA / f"{name}.jsonl")))
    answers = AnswerGenerator(engine, CODEC, SamplingSettings(samples=2)).answer(tasks)
    for one in answers:
        assert one.solved == (one.sample == 0), (one.problem_id, one.completion, one.why)
    return metrics_by_category(answers)


@pytest.mark.parametrize(
    ("name", "categories"),
    [
        ("aime", ["all", "geometry", "number theory"]),
        ("gpqa", ["all", "biology", "physics"]),
        ("ifeval", ["all", "case", "length"]),
    ],
)
def test_right_answers_are_distinguished_from_wrong_ones(name: str, categories: list[str]) -> None:
    metrics = measured(name)
    assert [row.category for row in metrics] == categories
    assert [(row.avg.mean, row.pass_at[1].mean, row.pass_at[2].mean) for row in metrics] == [(0.5, 0.5, 1.0)] * 3


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="run `make system`")
def test_programs_are_run_against_their_tests() -> None:
    metrics = measured("livecodebench")
    assert [row.category for row in metrics] == ["all", "function", "stdin"]
    assert [(row.avg.mean, row.pass_at[2].mean) for row in metrics] == [(0.5, 1.0)] * 3
