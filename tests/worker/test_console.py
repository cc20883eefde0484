"""What a contributor reads on the terminal."""

import pytest

from shoal.protocol import api
from shoal.worker.console import WorkerConsole
from support.tiny_run import Reports, make_lease


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def account(**fields: object) -> api.WorkerView:
    return api.WorkerView.model_validate({"key": "ab" * 32, "name": "w", "state": "probation"} | fields)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console(reports: Reports, clock: Clock) -> WorkerConsole:
    return WorkerConsole(reports, clock=clock, patience_s=5.0)


def test_a_submission_is_one_line(console: WorkerConsole, reports: Reports) -> None:
    console.submitted(make_lease(2), 64, 2100, 1400.0)
    console.update_account(account(credit_held=2100, submissions_accepted=1))
    console.submitted(make_lease(3), 64, 2100, 1400.0)
    assert reports == [
        "step 3 slot 2: 64 samples, 2,100 tokens at 1,400/s, submitted",
        "step 3 slot 3: 64 samples, 2,100 tokens at 1,400/s, submitted; "
        "1 accepted so far, credit 2,100 held, 0 released",
    ]


def test_short_waits_are_silent_and_long_ones_are_reported_once(
    console: WorkerConsole, reports: Reports, clock: Clock
) -> None:
    for now in (0.0, 1.0, 4.9):
        clock.now = now
        console.waiting("waiting for work")
    assert reports == []
    for now in (5.1, 6.0, 60.0):
        clock.now = now
        console.waiting("waiting for work")
    assert reports == ["waiting for work"]
    console.waiting("the run is paused")
    clock.now = 70.0
    console.waiting("the run is paused")
    assert reports == ["waiting for work", "the run is paused"]


def test_work_in_between_starts_the_patience_again(console: WorkerConsole, reports: Reports, clock: Clock) -> None:
    console.waiting("waiting for work")
    console.submitted(make_lease(0), 1, 1, 1.0)
    clock.now = 6.0
    console.waiting("waiting for work")
    assert len(reports) == 1


def test_a_change_of_the_trust_state_is_reported_with_what_it_means(console: WorkerConsole, reports: Reports) -> None:
    console.update_account(account())
    console.update_account(account(state="active"))
    console.update_account(account(state="active"))
    console.update_account(account(state="suspect", submissions_rejected=1))
    assert reports == [
        "now active: only a sample of the groups is audited from now on",
        "now suspect: an audit found something odd; clean work repairs it",
        "1 submission rejected, see the run",
    ]


def test_the_summary_adds_up(console: WorkerConsole, reports: Reports) -> None:
    console.update_account(account(credit_held=5, credit_released=6, submissions_accepted=2))
    console.summary(2, 1234)
    assert reports == ["2 submissions with 1,234 tokens this time; 2 accepted so far, credit 5 held, 6 released"]
