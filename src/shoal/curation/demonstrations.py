"""Worked solutions to learn from, and which of them are worth it.

A demonstration is a task with a completion: the text after the opened think tag, up to the answer. Filters are heuristic (format,
length, repetition) and automatic (the task's own verifier, near duplicates); each names its reason. JSONL, one task with a
`completion` per line; a leading think tag is taken off, because the prompt already opens it.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.curation.overlap import NearDuplicates, words
from shoal.errors import ConfigError
from shoal.protocol.verdicts import SOLVED
from shoal.tasks import THINK_CLOSE, THINK_OPEN, Task, TextCodec, score

COMPLETION, TARGET = "completion", "target_length"
REPEATED_WORDS = 8
MIN_WORDS = 64
"""Shorter texts say nothing about repetition: a short proof repeats its symbols."""


@dataclass(frozen=True)
class Demonstration:
    task: Task
    completion: str
    target_length: int = 0
    """The length that the prompt asks for; 0 asks for none."""


@dataclass(frozen=True)
class FilterSettings:
    """Each filter can be switched off by its extreme value."""

    min_tokens: int = 4
    max_tokens: int = 16_384
    max_repetition: float = 0.3
    """Share of 8-word runs that occurred before in the same text."""
    max_compression: float = 12.0
    """Bytes over zlib-compressed bytes; loops compress far better than prose or algebra."""
    correct: bool = True
    """Whether the verifier must accept the answer."""
    thinking: bool = True
    """Whether a demonstration thinks before it answers; without it the whole text is the answer."""
    similarity: float = 0.9
    """Demonstrations at least this similar to an earlier one are dropped; 1 drops equal ones only."""


class DemonstrationFilter:
    """Sees demonstrations one after the other; remembers them to find near duplicates."""

    def __init__(self, settings: FilterSettings, codec: TextCodec | None = None) -> None:
        self.settings, self._codec = settings, codec
        self._duplicates = NearDuplicates(settings.similarity)

    def refusal(self, demonstration: Demonstration) -> str:
        """The first reason against it, the cheapest first; empty if it is good."""
        settings, text = self.settings, demonstration.completion
        answer = text if settings.thinking else THINK_CLOSE + text
        if problem := format_problem(answer, thinking=settings.thinking):
            return problem
        if problem := self._length_problem(text):
            return problem
        if repetition(text) > settings.max_repetition or compression(text) > settings.max_compression:
            return "repetitive"
        if settings.correct and score(demonstration.task, answer).reward < SOLVED:
            return "wrong answer"
        return "near duplicate" if self._duplicates.seen(f"{demonstration.task.prompt} {text}") else ""

    def _length_problem(self, text: str) -> str:
        tokens = len(self._codec.encode(text)) if self._codec else len(words(text.replace(THINK_CLOSE, " ")))
        if tokens < self.settings.min_tokens:
            return "too short"
        return "too long" if tokens > self.settings.max_tokens else ""


def format_problem(text: str, *, thinking: bool = True) -> str:
    """A demonstration thinks, closes its thinking once, and answers."""
    thought, tag, answer = text.partition(THINK_CLOSE)
    if not tag:
        return "thinking not closed"
    if THINK_CLOSE in answer or THINK_OPEN in text:
        return "think tags nested or repeated"
    if thinking and not thought.strip():
        return "no thinking"
    return "" if answer.strip() else "no answer"


def repetition(text: str) -> float:
    """Share of 8-word runs that are not their first occurrence; 0 for short texts."""
    parts = words(text)
    if len(parts) < MIN_WORDS:
        return 0.0
    runs = [tuple(parts[start : start + REPEATED_WORDS]) for start in range(len(parts) - REPEATED_WORDS + 1)]
    return 1.0 - len(set(runs)) / len(runs)


def compression(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data, 6)) if data else 0.0


def filter_demonstrations(
    demonstrations: Iterable[Demonstration], settings: FilterSettings, codec: TextCodec | None = None
) -> Iterator[tuple[Demonstration, str]]:
    """Each demonstration with the reason against it, empty for the good ones."""
    filter_ = DemonstrationFilter(settings, codec)
    for demonstration in demonstrations:
        yield demonstration, filter_.refusal(demonstration)


def read_demonstrations(path: Path) -> Iterator[Demonstration]:
    """Line by line; a malformed one is refused by its number."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> Demonstration:
    try:
        row = json.loads(line)
        completion, target = str(row.pop(COMPLETION)).lstrip().removeprefix(THINK_OPEN), int(row.pop(TARGET, 0))
        return Demonstration(Task.model_validate(row), completion, target)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no demonstration: {error}.") from None
    except KeyError:
        raise ConfigError(
            f"{where} has no {COMPLETION}.", hint="A demonstration is a task with a completion."
        ) from None


def write_demonstration(demonstration: Demonstration) -> str:
    """One line of JSONL."""
    row = demonstration.task.model_dump(mode="json")
    return json.dumps({**row, COMPLETION: demonstration.completion, TARGET: demonstration.target_length})
