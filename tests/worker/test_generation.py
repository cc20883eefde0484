"""Slots on their way through an engine that ends what the test names."""

from collections.abc import Collection, Sequence
from typing import cast

import pytest

from shoal.policy.engine import Completion, GenerationRequest
from shoal.policy.episodes import EpisodeStream
from shoal.worker.admission import entry_order
from shoal.worker.generation import Generation
from shoal.worker.slots import Slot
from support.tiny_run import MAX_NEW_TOKENS, TinyRun, make_lease


class ScriptedStream:
    """Ends the requests that the test names, with N tokens each."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.ends: dict[int, int] = {}
        self.cancelled: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest], episodes: Sequence[object]) -> list[int]:
        assert len(requests) == len(episodes)
        self.requests += requests
        return list(range(len(self.requests) - len(requests), len(self.requests)))

    def step(self) -> list[tuple[int, Completion]]:
        ended = [(number, completion(tokens)) for number, tokens in self.ends.items()]
        self.ends = {}
        return ended

    def cancel(self, numbers: Collection[int]) -> None:
        self.cancelled += numbers


def completion(tokens: int) -> Completion:
    return Completion(tokens=[5] * tokens, logprobs=[0.0] * tokens, proofs=[], finish_reason="stop")


class Floor:
    def __init__(self, tiny_run: TinyRun) -> None:
        self._run = tiny_run
        self.scripted = ScriptedStream()
        self.stream = cast(EpisodeStream, self.scripted)
        self.generation = Generation(MAX_NEW_TOKENS, episode=lambda slot, at: None)

    def hold(self, number: int, **lease: float) -> Slot:
        granted = make_lease(number, **lease)  # type: ignore[arg-type]
        items = self._run.workload.items(bytes.fromhex(granted.slot_seed))
        slot = Slot(granted, items, self._run.root, entry_order(items, self.generation.lengths))
        self.generation.slots.append(slot)
        return slot

    def enter(self, slot: Slot, most: int) -> int:
        return self.generation.enter(slot, most, self.stream)

    def end(self, *numbers: int, tokens: int = 3) -> list[Slot]:
        self.scripted.ends = dict.fromkeys(numbers, tokens)
        return self.generation.step(self.stream)


@pytest.fixture
def floor(tiny_run: TinyRun) -> Floor:
    return Floor(tiny_run)


def test_a_slot_that_was_begun_goes_on_before_another_begins(floor: Floor) -> None:
    first, second = floor.hold(0), floor.hold(1)
    floor.enter(second, 3)
    assert floor.generation.entering(first.version, may_begin=True) == [second, first]
    assert floor.generation.entering(first.version, may_begin=False) == [second]


def test_samples_of_a_version_that_is_not_loaded_stay_outside(floor: Floor) -> None:
    slot = floor.hold(0)
    assert floor.generation.entering((slot.version[0] + 1, "ab" * 32), may_begin=True) == []
    assert floor.generation.entering(None, may_begin=True) == []


def test_a_slot_leaves_with_its_last_sample_whatever_the_order(floor: Floor) -> None:
    first, second = floor.hold(0), floor.hold(1)
    assert (floor.enter(first, 99), floor.enter(second, 99)) == (8, 8)
    assert floor.end(*range(1, 8), *range(8, 15)) == []
    assert (floor.generation.running, floor.generation.slots) == (2, [first, second])
    assert floor.end(15, 0) == [second, first]
    assert (floor.generation.running, floor.generation.slots) == (0, [])
    assert sorted(first.completions) == list(range(8))


def test_what_is_forgotten_is_cancelled_and_nothing_else(floor: Floor) -> None:
    first, second = floor.hold(0), floor.hold(1)
    floor.enter(first, 4)
    floor.enter(second, 4)
    floor.end(0)
    floor.generation.forget(first, floor.stream)
    assert floor.scripted.cancelled == [1, 2, 3]
    assert (floor.generation.running, floor.generation.waiting, floor.generation.slots) == (4, 4, [second])


def test_no_request_asks_for_more_tokens_than_the_run_allows(floor: Floor) -> None:
    floor.enter(floor.hold(0), 99)
    assert {request.max_new_tokens for request in floor.scripted.requests} == {MAX_NEW_TOKENS}


def test_before_anything_was_observed_every_slot_may_begin(floor: Floor) -> None:
    assert floor.generation.can_end(floor.hold(0, expires_at=10.0), now=11.0)


def test_a_slot_may_begin_if_its_longest_expected_sample_ends_before_the_lease(floor: Floor) -> None:
    floor.enter(floor.hold(0), 99)
    floor.end(*range(8), tokens=20)
    floor.generation.rates.step_s = 0.5
    slot = floor.hold(1, expires_at=100.0)
    assert floor.generation.can_end(slot, now=90.0)
    assert not floor.generation.can_end(slot, now=90.1)
