"""Which relay is asked next."""

import random
from collections import Counter

from shoal.broadcast.scores import AVOID_LIAR_S, PeerScores

GOOD, OTHER = "http://good", "http://other"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def scores(clock: Clock | None = None, *named: str) -> PeerScores:
    return PeerScores(named=named, rng=random.Random(0), clock=clock or Clock())


def test_a_relay_that_lied_once_is_still_asked_when_there_is_no_other() -> None:
    book = scores()
    book.record_lie(GOOD, "one bit")
    assert book.choose([GOOD]) == GOOD


def test_a_relay_that_lied_is_the_last_resort() -> None:
    clock = Clock()
    book = scores(clock)
    book.record_success(GOOD, 1 << 20, 0.001)
    book.record_lie(GOOD, "one bit")
    book.record_failure(OTHER, "gone")
    assert {book.choose([GOOD, OTHER]) for _ in range(100)} == {OTHER}
    assert book.choose([GOOD, OTHER], avoid=[OTHER]) == GOOD
    clock.now += AVOID_LIAR_S + 1
    assert {book.choose([GOOD, OTHER]) for _ in range(100)} == {GOOD, OTHER}


def test_a_crowd_of_dead_strangers_costs_a_few_requests() -> None:
    clock = Clock()
    book = scores(clock, GOOD)
    urls = [GOOD, *(f"http://stranger{number}" for number in range(64))]
    asked: Counter[str | None] = Counter()
    for _ in range(300):
        url = book.choose(urls)
        asked[url] += 1
        if url == GOOD:
            book.record_success(GOOD, 2 << 20, 0.1)
        else:
            book.record_failure(str(url), "no answer")
        clock.now += 1
    assert asked[GOOD] > 250


def test_strangers_that_serve_get_their_share() -> None:
    book = scores(None, GOOD)
    urls = [GOOD, *(f"http://stranger{number}" for number in range(7))]
    asked: Counter[str | None] = Counter()
    for _ in range(800):
        url = book.choose(urls)
        asked[url] += 1
        book.record_success(str(url), 2 << 20, 0.1)
    assert len(asked) == 8
    assert asked[GOOD] < 200


def test_a_stranger_that_failed_is_not_relied_on_for_a_long_time() -> None:
    clock = Clock()
    book = scores(clock, GOOD)
    for url in (GOOD, OTHER):
        book.record_failure(url, "no answer")
    clock.now += 30
    assert (book.alive(GOOD), book.alive(OTHER)) == (True, False)
    clock.now += 31
    assert book.alive(OTHER)
    book.record_failure(OTHER, "no answer")
    clock.now += 61
    assert not book.alive(OTHER)


def test_a_relay_that_fails_more_often_than_it_serves_is_not_relied_on() -> None:
    clock = Clock()
    book = scores(clock)
    for _ in range(20):
        book.record_success(OTHER, 100, 0.1)
        book.record_failure(OTHER, "no answer")
        book.record_failure(OTHER, "no answer")
        clock.now += 1000
    assert not book.alive(OTHER)
    for _ in range(5):
        book.record_success(OTHER, 100, 0.1)
    assert book.alive(OTHER)


def test_without_any_relay_there_is_no_choice() -> None:
    assert scores().choose([]) is None
    assert scores().choose([GOOD], avoid=[GOOD]) is None


def test_one_good_answer_after_many_failures_is_an_answer_but_no_reliability() -> None:
    book = scores(None, GOOD)
    assert not book.answers(GOOD)
    for _ in range(20):
        book.record_failure(GOOD, "refused")
    assert not book.answers(GOOD)
    book.record_success(GOOD, 0, 0.1)
    assert book.answers(GOOD)
    assert not book.alive(GOOD)
