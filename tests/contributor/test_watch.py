"""The watch over limits: what it says, how long a grace lasts, how seldom it asks, and how it waits before joining."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.contributor.control import Control, WorkerStatus
from shoal.contributor.limits import Conditions, Limits
from shoal.contributor.watch import LimitWatch, MemoryLimitError
from shoal.locks import hold
from support.tiny_run import Reports


@dataclass
class Laptop:
    root: Path
    limits: Limits
    now: float = 0.0
    seen: Conditions = field(default_factory=Conditions)
    asked: int = 0
    reports: Reports = field(default_factory=Reports)

    def __post_init__(self) -> None:
        self.control = Control(self.root)
        self.watch = LimitWatch(self.limits, self.control, self.conditions, self.reports, clock=lambda: self.now)

    def conditions(self, limits: Limits) -> Conditions:
        self.asked += 1
        return self.seen

    def after(self, seconds: float, **seen: object) -> None:
        self.now += seconds
        self.seen = Conditions(**seen) if seen else self.seen  # type: ignore[arg-type]
        self.watch.look()


def test_battery_rests_it_and_mains_let_it_go_on(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits(not_on_battery=True))
    laptop.after(0, on_battery=False)
    assert not laptop.watch.is_resting
    laptop.after(10, on_battery=True)
    assert laptop.watch.is_resting
    assert not laptop.watch.is_grace_over
    laptop.after(15)
    assert laptop.watch.is_grace_over
    laptop.after(10, on_battery=False)
    assert not laptop.watch.is_resting
    assert laptop.reports == ["resting: this machine is on battery", "working again"]


def test_a_pause_is_heard_at_once_and_said_once(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits())
    laptop.after(0)
    laptop.control.set_wish("pause")
    laptop.after(0.1)
    assert not laptop.watch.is_resting
    laptop.after(0.2)
    assert laptop.watch.is_resting
    for _ in range(50):
        laptop.after(1)
    laptop.control.set_wish("work")
    laptop.after(1)
    assert laptop.reports == ["resting: paused by you; `shoal work resume` goes on", "working again"]


def test_another_reason_is_said_too_and_begins_a_grace_of_its_own(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits(not_on_battery=True))
    laptop.after(0, on_battery=True)
    laptop.control.set_wish("pause")
    laptop.after(100)
    assert laptop.watch.rest is not None
    assert "paused" in laptop.watch.rest.reason
    laptop.control.set_wish("work")
    laptop.after(100)
    assert laptop.watch.is_resting
    assert len(laptop.reports) == 3


def test_the_machine_is_asked_seldom_however_often_the_loop_looks(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits(only_idle=True))
    for _ in range(1000):
        laptop.after(0.01, idle_s=1000.0)
    assert laptop.asked == 2


def test_more_memory_than_allowed_ends_the_worker_with_a_sentence(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits(memory_bytes=4 * 10**9))
    laptop.after(0, memory_bytes=3 * 10**9)
    with pytest.raises(MemoryLimitError, match=r"holds 1.5 GB more than the 4.0 GB of --memory; its slots go back"):
        laptop.after(10, memory_bytes=5_500_000_000)


def test_status_is_written_at_every_change_and_otherwise_once_a_second(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits())
    with hold(tmp_path / "lock", ""):
        laptop.after(0)
        laptop.watch.tell(WorkerStatus(state="working", tokens=1))
        laptop.watch.tell(WorkerStatus(state="working", tokens=2))
        assert laptop.control.status().tokens == 1
        laptop.after(1)
        laptop.watch.tell(WorkerStatus(state="working", tokens=3))
        assert laptop.control.status().tokens == 3
        laptop.control.set_wish("finish")
        laptop.after(0.3)
        laptop.watch.tell(WorkerStatus(state="working", tokens=4))
        assert (laptop.control.status().state, laptop.control.status().heard) == ("finishing", "finish")


@pytest.mark.parametrize(("wish", "joins"), [("work", True), ("finish", False)])
def test_before_joining_it_waits_until_it_may_or_is_asked_to_leave(wish: str, joins: bool, tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits())
    laptop.control.set_wish("pause")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        laptop.now += seconds
        if len(waits) == 3:
            laptop.control.set_wish(wish)  # type: ignore[arg-type]

    assert laptop.watch.wait("waiting", sleep=sleep) is joins
    assert len(waits) == 3


def test_a_long_wait_goes_on_listening_and_leaves_when_asked(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, Limits())
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        laptop.now += seconds

    laptop.watch.sleep(2.5, sleep=sleep)
    assert sum(waits) == pytest.approx(2.5)
    laptop.control.set_wish("finish")
    with pytest.raises(SystemExit) as end:
        laptop.watch.sleep(300, sleep=sleep)
    assert end.value.code == 0
