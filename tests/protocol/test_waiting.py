"""A coordinator that is away is waited for, in one sentence, until the deadline."""

import pytest

from shoal.errors import UnavailableError
from shoal.protocol.waiting import LAST_BACKOFF_S, REPORTED_AFTER_S, Wait, Waiting

WHO = "the coordinator at http://coordinator"


class Time:
    def __init__(self) -> None:
        self.now, self.naps, self.reports = 0.0, list[float](), list[str]()
        self.waiting = Waiting(self.reports.append, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def fail_until(time: Time, wait: Wait, seconds: float) -> None:
    while time.now < seconds:
        wait.pause(WHO, "connection refused")


def test_a_wait_that_lasts_is_reported_once() -> None:
    time = Time()
    wait = time.waiting.start(3600.0)
    fail_until(time, wait, REPORTED_AFTER_S)
    assert time.reports == []
    fail_until(time, wait, 600.0)
    assert time.reports == [f"Waiting for {WHO}, for up to 60 minutes: connection refused."]
    assert max(time.naps) <= LAST_BACKOFF_S


def test_calls_that_wait_at_the_same_time_report_one_outage_and_the_next_one_again() -> None:
    time = Time()
    first, second = time.waiting.start(3600.0), time.waiting.start(1800.0)
    fail_until(time, first, 60.0)
    fail_until(time, second, 120.0)
    assert len(time.reports) == 1
    first.end()
    second.end()
    fail_until(time, time.waiting.start(3600.0), 600.0)
    assert len(time.reports) == 2


def test_a_call_that_is_answered_at_once_does_not_end_the_wait_of_another() -> None:
    """As with a full disk: uploads wait, leases are answered."""
    time = Time()
    upload = time.waiting.start(3600.0)
    for seconds in (60.0, 120.0, 180.0):
        fail_until(time, upload, seconds)
        time.waiting.start(3600.0).end()
    assert len(time.reports) == 1


def test_a_short_wait_is_not_reported() -> None:
    time = Time()
    with pytest.raises(UnavailableError):
        fail_until(time, time.waiting.start(30.0), 60.0)
    assert time.reports == []


def test_the_deadline_ends_the_wait_before_it_has_passed() -> None:
    time = Time()
    with pytest.raises(UnavailableError, match=f"^T{WHO[1:]} did not answer for 600 s") as caught:
        fail_until(time, time.waiting.start(600.0), 1e9)
    assert 590 < time.now <= 600
    assert "(connection refused)" in caught.value.message


def test_a_client_that_leaves_does_not_wait() -> None:
    time = Time()
    running = time.waiting.start(3600.0)
    fail_until(time, running, 60.0)
    time.waiting.limit(2.0)
    with pytest.raises(UnavailableError):
        fail_until(time, running, 1e9)
    assert time.now < 63
    time.now = 1000.0
    later = time.waiting.start(3600.0)
    assert later.left_s() == 2.0, "the limit counts from the call, not from when it was set"


def test_a_limit_does_not_lengthen_a_shorter_deadline() -> None:
    time = Time()
    time.waiting.limit(60.0)
    assert time.waiting.start(5.0).left_s() == 5.0


def test_a_server_that_says_when_to_come_back_is_not_asked_earlier() -> None:
    time = Time()
    time.waiting.start(600.0).pause(WHO, "429: slow down", 20.0)
    assert 20.0 <= time.naps[0] <= 25.0
