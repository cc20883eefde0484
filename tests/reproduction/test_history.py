"""What a ledger says was trained: files by slot, audits before the batch, recalls, rewinds."""

import json
from typing import Any

from shoal.coordinator.ledger import Entry
from shoal.protocol.steps import StepId
from shoal.reproduction.history import History

SECRET = "5a" * 32


def ledger(*rows: tuple[str, dict[str, Any]]) -> list[Entry]:
    return [Entry(seq, float(seq), kind, json.dumps(body), "", "", "") for seq, (kind, body) in enumerate(rows)]


def verdict(step: int = 0, slot: int = 0, file: str = "f0", **changes: Any) -> tuple[str, dict[str, Any]]:
    body = {
        "epoch": 0,
        "step": step,
        "attempt": 0,
        "slot": slot,
        "worker": "w",
        "version": step,
        "file": file,
        "accepted": True,
        "audited": [],
        "reasons": [],
        "use": "counts",
        "groups": 2,
    }
    return "verdict", body | changes


def recorded(step: int, *groups: str) -> tuple[str, dict[str, Any]]:
    return "recorded", {"epoch": 0, "step": step, "attempt": 0, "groups": list(groups), "step_secret": SECRET}


def version(number: int, weights: str) -> tuple[str, dict[str, Any]]:
    return "version", {"version": number, "manifest": "m", "weights": weights}


def test_a_step_has_its_groups_in_order_with_their_files_and_the_weights_that_followed() -> None:
    made = History.of(
        ledger(
            version(0, "a"), verdict(0, 0, "f0"), verdict(0, 1, "f1"), recorded(0, "0/1/0", "0/0/1"), version(1, "b")
        )
    )
    assert [(group.group_id, group.number, group.file.digest) for group in made.steps[0].groups] == [
        ("0/1/0", 0, "f1"),
        ("0/0/1", 1, "f0"),
    ]
    assert made.weights == {0: "a", 1: "b"}
    assert made.secrets == {StepId(0, 0, 0): bytes.fromhex(SECRET)}


def test_log_probabilities_count_as_audited_only_if_the_audit_came_before_the_batch() -> None:
    again = verdict(0, 0, "f0", audited=[0, 1], use="confirmed")
    before = History.of(ledger(verdict(0, 0, "f0"), again, recorded(0, "0/0/0")))
    after = History.of(ledger(verdict(0, 0, "f0"), recorded(0, "0/0/0"), again))
    assert before.steps[0].groups[0].file.audited == {0, 1}
    assert after.steps[0].groups[0].file.audited == frozenset()


def test_only_the_file_that_counts_is_trained_on() -> None:
    made = History.of(
        ledger(
            verdict(0, 0, "junk", accepted=False, reasons=["reward"]),
            verdict(0, 0, "first"),
            verdict(0, 0, "second", use="further"),
            verdict(0, 0, "third", use="late"),
            recorded(0, "0/0/0"),
        )
    )
    assert made.steps[0].groups[0].file.digest == "first"
    assert set(made.files) == {"junk", "first", "second", "third"}


def test_a_group_without_an_accepted_file_is_named() -> None:
    made = History.of(ledger(verdict(0, 0, "junk", accepted=False), recorded(0, "0/0/0")))
    assert made.steps[0].unknown == ("0/0/0",)


def test_a_recalled_batch_is_replaced_by_what_follows() -> None:
    made = History.of(
        ledger(
            *(verdict(0, 0, "f0"), verdict(0, 1, "f1"), recorded(0, "0/0/0", "0/1/0")),
            *(("recalled", {"step": 0}), recorded(0, "0/1/0")),
        )
    )
    assert [group.group_id for group in made.steps[0].groups] == ["0/1/0"]


def test_a_rewind_voids_every_later_step_and_version() -> None:
    made = History.of(
        ledger(
            *(version(0, "a"), verdict(0), recorded(0, "0/0/0"), version(1, "b"), verdict(1, 0, "g")),
            *(recorded(1, "1/0/0"), version(2, "c")),
            ("rewound", {"epoch": 1, "step": 1, "attempt": 0, "version": 1}),
        )
    )
    assert sorted(made.steps) == [0]
    assert made.weights == {0: "a", 1: "b"}


def test_steps_without_a_version_are_in_training_only_at_the_end() -> None:
    rows = [version(0, "a"), recorded(0), version(1, "b"), recorded(1), version(2, "c"), recorded(2), recorded(3)]
    assert History.of(ledger(*rows)).in_training() == [2, 3]
    assert History.of(ledger(*rows[:5])).in_training() == []
    gap = [version(0, "a"), recorded(0), recorded(1), version(2, "c")]
    assert History.of(ledger(*gap)).in_training() == [], "a version that is missing in between is a finding"
    assert History.of(ledger(recorded(0))).in_training() == [0]
