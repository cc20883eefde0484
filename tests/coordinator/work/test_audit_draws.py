"""Audits are drawn when the file arrives, and everybody can repeat the draw."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shoal.coordinator.ledger import LedgerError, check_secrets, verify_export
from support.samples import keypair
from support.swarm import Swarm


def audited_late(swarm: Swarm) -> list[dict[str, Any]]:
    """Ann's file completes the batch of step 0; bob's file of that step comes after the step's secret is public."""
    swarm.publish(0)
    ann, bob = swarm.join("ann", "bob")
    swarm.work(ann)
    late = swarm.lease(bob)
    swarm.accept()
    bob.submit(late.lease_id, b"late")
    swarm.accept()
    for row in swarm.all("SELECT step FROM batches ORDER BY step"):
        swarm.record(int(str(row["step"])))
    return [json.loads(str(row["body"])) for row in swarm.all("SELECT body FROM ledger WHERE kind='verdict'")]


def test_the_draw_uses_the_step_that_is_open_when_the_file_arrives(swarm: Swarm) -> None:
    first, *_, last = audited_late(swarm)
    assert (first["step"], first["audit_step"]) == (0, [0, 0, 0])
    assert last["step"] == 0
    assert last["audit_step"][1] > 0, "the secret of step 0 was public when this file was made"
    assert last["audit_rate"] == 1.0


def test_everybody_can_repeat_the_draws_from_an_export(swarm: Swarm) -> None:
    audited_late(swarm)
    export = swarm.whole_ledger().splitlines()
    entries, _ = verify_export(export, keypair("coordinator").public)
    formed = swarm.all("SELECT step FROM batches")
    assert check_secrets(entries) == len(formed) > 0, "one file arrived during each step"


def test_an_audit_that_the_draw_does_not_explain_is_located(swarm: Swarm) -> None:
    audited_late(swarm)
    entries, _ = verify_export(swarm.whole_ledger().splitlines(), keypair("coordinator").public)
    number = next(number for number, entry in enumerate(entries) if entry.kind == "verdict")
    lie = json.loads(entries[number].body) | {"audit_drawn": [0]}
    entries[number] = replace(entries[number], body=json.dumps(lie))
    with pytest.raises(LedgerError, match=rf"Entry {number}: groups \[0\] are recorded as drawn"):
        check_secrets(entries)
