"""A contributor's limits in the real loop: nothing new begins, what was begun ends or goes back, and all of it is said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.contributor.control import Control, WorkerStatus
from shoal.contributor.limits import Conditions, Limits
from shoal.contributor.watch import LimitWatch, MemoryLimitError
from shoal.protocol import api
from support.tiny_run import TinyRun, make_lease
from worker.test_loop import Contributor, at_step, eight_rows

__all__ = ["eight_rows"]
FOR_EVER_S = 1e6


@dataclass
class Desk:
    """A machine whose battery, users and clock a test moves; the clock advances with every look."""

    contributor: Contributor
    root: Path
    limits: Limits = field(default_factory=Limits)
    seen: Conditions = field(default_factory=Conditions)
    now: float = 0.0
    pace_s: float = 1.0
    """What passes from one look at the clock to the next."""

    def __post_init__(self) -> None:
        self.control = Control(self.root)
        self.watch = LimitWatch(
            self.limits, self.control, lambda _: self.seen, self.contributor.reports, clock=self._clock
        )
        self.contributor.worker.wishes.watch = self.watch

    def _clock(self) -> float:
        self.now += self.pace_s
        if self.now > FOR_EVER_S:  # a test that expects the wrong thing fails instead of resting for ever
            self.seen = Conditions()
        return self.now

    def resume_when_given_back(self, lease_id: str) -> None:
        """Lets the worker go on as soon as this slot went back, so that the run ends."""
        give_back = self.contributor.worker._leases.give_back

        def noting(lease: api.Lease) -> bool:
            done = give_back(lease)
            if lease_id in self.contributor.coordinator.returned:
                self.seen = Conditions()
                self.control.set_wish("work")
            return done

        self.contributor.worker._deliveries._give_back = noting


@pytest.fixture
def contributor(tiny_run: TinyRun) -> Contributor:
    return Contributor(tiny_run, 0)


@pytest.fixture(autouse=True)
def listens_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.worker.weights.LISTEN_S", 0.001)


def test_a_wish_to_leave_is_met_while_the_first_version_is_still_coming(tiny_run: TinyRun, tmp_path: Path) -> None:
    waiting = Contributor(tiny_run)  # no version is published, so its download never ends
    desk = Desk(waiting, tmp_path)
    said: list[str] = []
    tell = desk.control.tell

    def note(status: WorkerStatus) -> None:
        said.append(f"{status.state}: {status.activity}")
        tell(status)
        desk.control.set_wish("finish")

    desk.control.tell = note  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as end:
        waiting.worker.run()
    assert end.value.code == 0
    assert said[0] == "joining: fetching the policy"
    assert said[-1].startswith("finishing")
    assert waiting.reports.some("leaving: no slot is held")
    assert waiting.coordinator.registered == []


def test_a_machine_that_goes_on_battery_while_it_joins_fetches_nothing_further(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    joining = Contributor(tiny_run, 0)
    desk = Desk(joining, tmp_path, Limits(not_on_battery=True), Conditions(on_battery=True), pace_s=10.0)
    joining.coordinator.finish()
    looks = 0
    look = desk.watch.look

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()
        if looks == 20:
            assert joining.worker.weights._is_held
            desk.seen = Conditions()

    desk.watch.look = counted  # type: ignore[method-assign]
    joining.worker.weights.hold(True)
    joining.worker.run()
    assert looks > 20
    assert joining.reports.some("resting: this machine is on battery")
    assert joining.reports.some("working again")


def test_on_battery_slots_go_back_and_on_mains_work_goes_on(contributor: Contributor, tmp_path: Path) -> None:
    desk = Desk(contributor, tmp_path, Limits(not_on_battery=True), pace_s=100.0)
    contributor.coordinator.grant(make_lease(0), make_lease(1))
    contributor.coordinator.finish()
    at_step(contributor, 2, lambda: setattr(desk, "seen", Conditions(on_battery=True)))
    desk.resume_when_given_back("lease-3-0")
    contributor.worker.run()
    assert "lease-3-0" in contributor.coordinator.returned
    assert "lease-3-0" not in contributor.submitted
    said = "\n".join(contributor.reports)
    assert "resting: this machine is on battery" in said
    assert "step 3 slot 0 goes to another worker, " in said
    assert "of 8 samples were done" in said
    assert "working again" in said


def test_what_ends_within_the_grace_is_finished_and_submitted(contributor: Contributor, tmp_path: Path) -> None:
    desk = Desk(contributor, tmp_path, Limits(not_on_battery=True), pace_s=0.00001)
    desk.watch._conditions_at = -1000.0
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.finish()

    def unplug() -> None:
        desk.seen = Conditions(on_battery=True)
        desk.watch._conditions_at = -1000.0

    def plug_in(*_: object) -> None:
        desk.seen = Conditions()
        desk.watch._conditions_at = -1000.0

    at_step(contributor, 2, unplug)
    submitted = contributor.worker._deliveries._on_submitted

    def plug_in_afterwards(*facts: Any) -> None:
        submitted(*facts)
        plug_in()

    contributor.worker._deliveries._on_submitted = plug_in_afterwards
    contributor.worker.run()
    assert contributor.submitted == ["lease-3-0"]
    assert contributor.coordinator.returned == []
    assert contributor.reports.some("resting: this machine is on battery")


def test_finish_submits_what_was_begun_and_leaves(contributor: Contributor, tmp_path: Path) -> None:
    desk = Desk(contributor, tmp_path)
    contributor.coordinator.grant(*(make_lease(slot) for slot in range(6)))
    at_step(contributor, 2, lambda: desk.control.set_wish("finish"))
    contributor.worker.run()
    assert "lease-3-0" in contributor.submitted
    assert len(contributor.submitted) + len(contributor.coordinator.returned) <= 6
    assert not set(contributor.submitted) & set(contributor.coordinator.returned)
    assert contributor.reports.some("leaving, as you asked: what was begun is finished and submitted")


def test_a_paused_worker_takes_no_lease_and_says_so_to_the_coordinator(
    contributor: Contributor, tmp_path: Path
) -> None:
    desk = Desk(contributor, tmp_path)
    desk.control.set_wish("pause")
    contributor.coordinator.finish()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            assert contributor.coordinator.lease_bodies == []
            assert contributor.worker.console.activity.startswith("resting: paused by you")
            desk.control.set_wish("work")
        real()

    real = desk.watch.look
    desk.watch.look = look  # type: ignore[method-assign]
    contributor.worker.run()
    assert looks >= 20
    assert len(contributor.coordinator.lease_bodies) == 1


def test_too_much_memory_gives_the_slots_back_and_ends(contributor: Contributor, tmp_path: Path) -> None:
    desk = Desk(contributor, tmp_path, Limits(memory_bytes=10**9))
    contributor.coordinator.grant(make_lease(0))
    contributor.coordinator.wait("waiting_for_trainer", times=50)
    at_step(contributor, 2, lambda: setattr(desk, "seen", Conditions(memory_bytes=2 * 10**9)))
    with pytest.raises(MemoryLimitError, match="its slots go back"):
        contributor.worker.run()
    assert contributor.coordinator.returned == ["lease-3-0"]
