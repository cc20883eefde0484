"""A stream that plays episodes: while one waits for its environment, others decode.

In: requests, each with its episode, or without one for a plain completion. Out: completions when they end; that of an episode has
all its segments. The turns of an episode follow each other in the engine with its cache; environments are asked on threads, and a
row that waits for one holds no place in the batch. With nothing to decode, a step waits for the first environment that answers.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType

from shoal.errors import UnavailableError
from shoal.policy.engine import Completion, Engine, GenerationRequest, Stream, positions_needed
from shoal.policy.turns import join_turns
from shoal.tasks.environments.episodes import Episode

AT_ONCE = 64
"""Environments that are asked at a time."""
ANSWER_WAIT_S = 0.2
"""How long a step waits for an environment when there is nothing to decode."""


@dataclass
class _Sample:
    number: int
    request: GenerationRequest
    episode: Episode | None
    turns: list[Completion] = field(default_factory=list)
    asked_at: float = 0.0
    error: BaseException | None = None
    """What went wrong beside the environment; the next step raises it."""

    def next_request(self) -> GenerationRequest:
        episode, first = self.episode, self.request
        if episode is None:
            return first
        prompt = (*first.prompt_tokens, *episode.tokens)
        carry = self.turns[-1].carry if self.turns else None
        return GenerationRequest(prompt, first.seed, min(episode.turn_limit, first.max_new_tokens), carry, keeps=True)

    def completion(self) -> Completion:
        if self.episode is None or not self.episode.finish_reason:
            return self.turns[-1]
        joined = join_turns(self.turns)
        joined.tokens, joined.segment_lengths = self.episode.tokens, self.episode.lengths
        joined.finish_reason = self.episode.finish_reason
        return joined


class EpisodeStream:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._samples: dict[int, _Sample] = {}
        self._decoding: dict[int, _Sample] = {}
        self._asked: set[int] = set()
        self._answers: SimpleQueue[_Sample] = SimpleQueue()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="environments")
        self._submitted = 0
        self.environment_s = 0.0
        """Seconds that episodes have waited for their environments, summed over episodes."""

    @property
    def rows(self) -> int:
        return self._stream.rows

    @property
    def unfinished(self) -> int:
        return len(self._samples)

    @property
    def occupied(self) -> int:
        """Rows that are not free: those that decode, and beyond twice the rows those that wait for an environment too."""
        return max(self._stream.unfinished, self.unfinished - self.rows)

    @property
    def generated(self) -> int:
        return self._stream.generated

    def submit(
        self, requests: Sequence[GenerationRequest], episodes: Sequence[Episode | None] | None = None
    ) -> list[int]:
        numbers = [*range(self._submitted, self._submitted + len(requests))]
        chosen = episodes or [None] * len(requests)
        samples = [_Sample(*entry) for entry in zip(numbers, requests, chosen, strict=True)]
        self._begin(samples)
        self._submitted += len(requests)
        self._samples.update(zip(numbers, samples, strict=True))
        return numbers

    def _begin(self, samples: Sequence[_Sample]) -> None:
        numbers = self._stream.submit([sample.next_request() for sample in samples])
        self._decoding.update(zip(numbers, samples, strict=True))

    def step(self) -> list[tuple[int, Completion]]:
        ended = self._hear_environments()
        if self._stream.unfinished:
            for number, completion in self._stream.step():
                sample = self._decoding.pop(number)
                sample.turns.append(completion)
                if sample.episode is None:
                    ended.append(sample)
                else:
                    self._ask(sample)
        for sample in ended:
            self._samples.pop(sample.number, None)
        return [(sample.number, sample.completion()) for sample in ended]

    def _ask(self, sample: _Sample) -> None:
        sample.asked_at = time.monotonic()
        self._asked.add(sample.number)
        self._threads.submit(self._take, sample)

    def _take(self, sample: _Sample) -> None:
        assert sample.episode is not None
        try:
            sample.episode.take(sample.turns[-1].tokens)
        except UnavailableError as error:
            sample.episode.fail(error.message)
        except BaseException as error:
            sample.error = error
        finally:
            self._answers.put(sample)

    def _hear_environments(self) -> list[_Sample]:
        """Episodes that are over; those that go on are submitted again."""
        answered = self._answered()
        going_on = [sample for sample in answered if sample.episode is not None and not sample.episode.is_over]
        self._begin(going_on)
        return [sample for sample in answered if sample not in going_on]

    def _answered(self) -> list[_Sample]:
        found: list[_Sample] = []
        wait_s = ANSWER_WAIT_S if self._asked and not self._stream.unfinished else 0.0
        while self._asked:
            try:
                sample = self._answers.get(timeout=wait_s) if wait_s and not found else self._answers.get_nowait()
            except Empty:
                break
            self.environment_s += time.monotonic() - sample.asked_at
            if sample.number in self._asked:  # else it was cancelled
                self._asked.remove(sample.number)
                if sample.error is not None:
                    raise sample.error
                found.append(sample)
        return found

    def cancel(self, numbers: Collection[int]) -> None:
        dropped = set(numbers)
        inner = [number for number, sample in self._decoding.items() if sample.number in dropped]
        self._stream.cancel(inner)
        for number in inner:
            del self._decoding[number]
        self._asked -= dropped
        for number in dropped:
            sample = self._samples.pop(number, None)
            if sample is not None and sample.episode is not None:
                sample.episode.close()

    def close(self) -> None:
        self.cancel(list(self._samples))
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._stream.close()

    def __enter__(self) -> "EpisodeStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def play_all(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    episodes: Sequence[Episode | None],
    *,
    temperature: float,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Every episode or plain completion, in the order of the requests; `on_progress` as for `Engine.generate`."""
    if not any(episodes):
        return engine.generate(requests, temperature=temperature, on_progress=on_progress)
    longest = positions_needed(requests)
    with EpisodeStream(engine.open(temperature=temperature, max_tokens=longest, rows=len(requests))) as stream:
        numbers = stream.submit(requests, episodes)
        ended: dict[int, Completion] = {}
        while stream.unfinished:
            ended.update(stream.step())
            if on_progress is not None:
                on_progress(stream.generated)
    return [ended[number] for number in numbers]
