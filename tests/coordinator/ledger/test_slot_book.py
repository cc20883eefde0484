"""Which verdicts on a slot contradict what the ledger says of steps."""

import pytest

from shoal.coordinator.ledger.slot_book import SlotBook
from shoal.protocol.steps import StepId

UNPAID = {
    "worker": "w", "epoch": 0, "step": 15, "attempt": 0, "slot": 13, "lease": "l", "version": 13, "use": "unpaid",
    "accepted": True, "tokens": 10, "useful": [], "audited": [], "shares": None, "files": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("committed", "findings"),
    [
        (16, 1),  # step 15 is current: version 13 is young enough
        (17, 0),  # step 16 has begun
        (18, 0),  # step 17 has begun, and the batch of step 15 is not recorded yet
    ],
)
def test_a_version_is_too_old_for_the_step_that_has_begun_not_for_the_last_recorded_one(
    committed: int, findings: int
) -> None:
    book = SlotBook()
    book.set_terms(slot_tokens=100, async_level=2)
    book.begin(StepId(step=committed))
    found = list(book.take_verdict(435, UNPAID, usable=True, current=StepId(step=15)))
    assert [finding.text for finding in found] == [
        "the file earns nothing although its version was young enough"
    ] * findings


def test_steps_of_an_epoch_that_was_left_count_no_more() -> None:
    book = SlotBook()
    book.set_terms(slot_tokens=100, async_level=2)
    book.begin(StepId(step=40))
    book.begin(StepId(epoch=1, step=16))
    assert list(book.take_verdict(1, UNPAID | {"epoch": 1}, usable=True, current=StepId(epoch=1, step=15)))
