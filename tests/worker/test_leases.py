"""Leases are taken in the background: as many as the loop has room for, each prepared, given back or reported by itself."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from shoal.errors import UnavailableError
from shoal.metrics import silent
from shoal.protocol import api
from shoal.worker.leases import FAILURES_IN_A_ROW, LeaseTaker, News, NoWork, Taken
from shoal.worker.slots import Slot

PATIENCE_S = 30
NOTHING = api.LeaseAnswer(reason="no_work", retry_after_s=0.0)


def lease(slot: int) -> api.Lease:
    return api.Lease(
        lease_id=f"lease-{slot}",
        step=3,
        slot=slot,
        slot_seed="00",
        policy_version=2,
        manifest_digest="0" * 64,
        expires_at=1e12,
    )


def granted(*slots: int) -> api.LeaseAnswer:
    first, *others = [lease(slot) for slot in slots]
    return api.LeaseAnswer(lease=first, beside=others)


class Desk:
    """The coordinator, the weights and the inbox of a taker. The answers end with a request that waits for the end."""

    def __init__(self, *answers: api.LeaseAnswer) -> None:
        self.answers, self.asked, self.returned = list(answers), list[api.LeaseBody](), list[str]()
        self.inbox: SimpleQueue[News] = SimpleQueue()
        self.ended = threading.Event()
        self.taker = LeaseTaker(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            prepare=lambda lease: self.prepare(lease),
            register=lambda: None,
            inbox=self.inbox,
            report=silent,
        )
        self.prepare: Callable[[api.Lease], Slot] = lambda lease: Slot(lease, [], Path(), [])

    def lease(self, body: api.LeaseBody) -> api.LeaseAnswer:
        self.asked.append(body)
        return self.answers.pop(0) if self.answers else NOTHING

    def give_back(self, lease_id: str) -> None:
        self.returned.append(lease_id)

    def newest(self) -> int:
        return 2

    def wait_newer(self, version: int, timeout_s: float) -> Any:
        self.ended.wait(timeout_s)

    def heard(self, count: int) -> list[News]:
        return [self.inbox.get(timeout=PATIENCE_S) for _ in range(count)]

    def slots(self, count: int) -> list[int]:
        return [news.slot.lease.slot for news in self.heard(count) if isinstance(news, Taken)]


@pytest.fixture
def open_desks() -> Iterator[list[Desk]]:
    desks = list[Desk]()
    yield desks
    for desk in desks:
        desk.ended.set()
        desk.taker.stop(is_refused=False)


@pytest.fixture
def start(open_desks: list[Desk]) -> Callable[..., Desk]:
    def begin(*answers: api.LeaseAnswer) -> Desk:
        open_desks.append(Desk(*answers))
        open_desks[-1].taker.start()
        return open_desks[-1]

    return begin


def test_one_request_brings_all_slots_that_the_engine_can_take(start: Callable[..., Desk]) -> None:
    desk = start(granted(0, 1, 2))
    desk.taker.ask(3, [1, 2])
    assert desk.slots(3) == [0, 1, 2]
    assert [(body.most, body.held_versions) for body in desk.asked] == [(3, [1, 2])]


def test_what_the_first_answer_lacks_is_asked_for_again(start: Callable[..., Desk]) -> None:
    desk = start(granted(0, 1), granted(2))
    desk.taker.ask(4, [2])
    assert desk.slots(3) == [0, 1, 2]
    assert isinstance(desk.heard(1)[0], NoWork)
    assert [body.most for body in desk.asked] == [4, 2, 1]
    assert len({body.request_id for body in desk.asked}) == 3


def test_nobody_asks_for_more_at_once_than_one_answer_can_hold(start: Callable[..., Desk]) -> None:
    desk = start()
    desk.taker.ask(1000, [2])
    desk.heard(1)
    assert desk.asked[0].most == api.MOST_LEASES


def test_a_slot_that_cannot_be_prepared_goes_back_and_the_others_of_its_answer_are_worked_on(
    start: Callable[..., Desk],
) -> None:
    desk = start(granted(0, 1, 2))

    def prepare(lease: api.Lease) -> Slot:
        if lease.slot == 1:
            raise UnavailableError("No relay has version 2.")
        return Slot(lease, [], Path(), [])

    desk.prepare = prepare
    desk.taker.ask(3, [2])
    assert desk.slots(3) == [0, 2]
    assert desk.returned == ["lease-1"]


def test_a_row_of_slots_that_cannot_be_prepared_ends_the_worker(start: Callable[..., Desk]) -> None:
    desk = start(granted(*range(FAILURES_IN_A_ROW)))

    def refuse(lease: api.Lease) -> Slot:
        raise UnavailableError("No relay has version 2.")

    desk.prepare = refuse
    desk.taker.ask(FAILURES_IN_A_ROW, [2])
    assert isinstance(desk.heard(FAILURES_IN_A_ROW)[-1], UnavailableError)
    assert desk.returned == [f"lease-{slot}" for slot in range(FAILURES_IN_A_ROW)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_slots_that_come_while_the_worker_leaves_go_back_unless_its_key_is_refused(is_refused: bool) -> None:
    desk = Desk(granted(0, 1, 2))
    preparing, go_on = threading.Event(), threading.Event()

    def prepare(lease: api.Lease) -> Slot:
        preparing.set()
        assert go_on.wait(PATIENCE_S)
        return Slot(lease, [], Path(), [])

    desk.prepare = prepare
    desk.taker.start()
    desk.taker.ask(3, [2])
    assert preparing.wait(PATIENCE_S)
    leaving = threading.Thread(target=desk.taker.stop, kwargs={"is_refused": is_refused})
    leaving.start()
    assert desk.taker._stopping.wait(PATIENCE_S)
    go_on.set()
    leaving.join(PATIENCE_S)
    assert desk.returned == ([] if is_refused else ["lease-0", "lease-1", "lease-2"])
    assert desk.inbox.empty()
