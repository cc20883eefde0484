"""When a step begins: the books know it from commitments, because a proposed batch has no entry."""

from typing import Any

import pytest

from shoal.config import TrustConfig
from shoal.coordinator.ledger.books import Books


def at_step_two(*, is_third_begun: bool) -> Books:
    """Steps 0 and 1 are recorded; the batch of step 2 is proposed or not."""
    books = Books()
    entries: list[tuple[str, dict[str, Any]]] = [
        ("terms", {"trust": TrustConfig().model_dump(), "slot_tokens": 1000, "async_level": 2}),
        *(("commitment", {"epoch": 0, "step": step, "attempt": 0, "commitment": "c"}) for step in range(4)),
        *(
            ("recorded", {"epoch": 0, "step": step, "attempt": 0, "groups": [], "step_secret": "s"})
            for step in range(2)
        ),
    ]
    if is_third_begun:
        entries.append(("commitment", {"epoch": 0, "step": 4, "attempt": 0, "commitment": "c"}))
    for seq, (kind, body) in enumerate(entries):
        assert not list(books.take(seq, kind, body))
    return books


def unpaid(version: int) -> dict[str, Any]:
    return {
        "worker": "w",
        "epoch": 0,
        "step": 2,
        "attempt": 0,
        "slot": 0,
        "lease": "l",
        "version": version,
        "file": "f",
        "position": 0,
        "use": "unpaid",
        "accepted": True,
        "reasons": [],
        "tokens": 10,
        "groups": 2,
        "useful": [],
        "shares": None,
        "files": 0,
        "audited": [0, 1],
        "drift": "honest",
        "audit_drawn": [],
        "audit_rate": 1.0,
    }


@pytest.mark.parametrize(("is_third_begun", "is_found"), [(True, False), (False, True)])
def test_a_file_of_version_0_earns_nothing_once_step_3_has_begun(is_third_begun: bool, is_found: bool) -> None:
    findings = list(at_step_two(is_third_begun=is_third_begun).take(20, "verdict", unpaid(version=0)))
    assert any("young enough" in finding.text for finding in findings) is is_found


def test_a_younger_file_cannot_be_left_unpaid_by_an_early_commitment() -> None:
    findings = list(at_step_two(is_third_begun=True).take(20, "verdict", unpaid(version=1)))
    assert any("young enough" in finding.text for finding in findings)
