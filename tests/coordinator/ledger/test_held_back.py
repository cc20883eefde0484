"""Entries of open steps are not public: the export ends before them, is whole by itself, and grows as steps are recorded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.ledger.operator import COORDINATOR, check, export, facts_of, head_of, number_of, signed_again
from shoal.coordinator import ledger
from shoal.coordinator.ledger.kept import KeptEvidence
from shoal.coordinator.page.session import link_secret
from shoal.protocol import api
from shoal.protocol.evidence import Receipt, open_evidence
from support.samples import RUN_SECRET
from support.swarm import Swarm, ledger_kinds, running, small_config

NOW = 2_000_000.0


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, small_config(run={"steps": 9})) as swarm:
        swarm.publish(0)
        yield swarm


def whole(swarm: Swarm) -> list[bytes]:
    """What the owner's browser downloads."""
    cookie = swarm.http.post("/v1/owner/session", json={"secret": link_secret(RUN_SECRET, "run-1", 0)})
    answer = swarm.http.get("/v1/ledger", headers={"cookie": cookie.headers["set-cookie"].split(";")[0]})
    swarm.http.cookies.clear()
    return answer.content.splitlines()


def held_back(swarm: Swarm) -> int:
    return len(whole(swarm)) - len(export(swarm))


def test_a_verdict_is_public_once_the_batch_of_its_step_is_recorded(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    assert held_back(swarm) == 0
    swarm.produce(ann)
    lines = export(swarm)
    assert "verdict" not in [fact["kind"] for fact in facts_of(lines)]
    assert held_back(swarm) == len(ledger_kinds(swarm)) - len(facts_of(lines)) > 0
    result = check(lines)
    assert result.findings == []
    assert any(f"the newest {held_back(swarm)} entries: they are not public" in text for text in result.unchecked)
    swarm.sweep()
    swarm.publish(1)
    lines = export(swarm)
    assert held_back(swarm) == 0
    assert number_of(lines, "verdict") < number_of(lines, "recorded")
    result = check(lines)
    assert (result.findings, result.draws) == ([], 1)
    assert not any("not public" in text for text in result.unchecked)


def test_a_public_export_names_no_slot_draw_or_sharer_of_an_open_step(swarm: Swarm) -> None:
    ann, bob = swarm.join("ann", "bob")
    for worker in (ann, bob):
        swarm.work(worker)
        swarm.accept(useful=0)
    text = b"\n".join(export(swarm)).decode()
    for secret in ("slot\\", "audit_drawn", "audit_rate", "audited\\", "useful_rate", "drift", "shares", "credit"):
        assert secret not in text, secret


def test_a_file_of_an_earlier_step_is_held_back_with_the_step_that_drew_its_audit(swarm: Swarm) -> None:
    ann, bob = swarm.join("ann", "bob")
    first, late = swarm.lease(ann), swarm.lease(bob)
    ann.submit(first.lease_id, b"rollouts in time")
    swarm.accept()
    swarm.sweep()
    swarm.publish(1)
    bob.submit(late.lease_id, b"late rollouts")
    swarm.accept()
    assert held_back(swarm) > 0
    assert number_of(whole(swarm), "verdict", slot=late.slot) >= len(facts_of(export(swarm)))


def test_the_owner_and_everybody_after_the_end_read_everything(tmp_path: Path) -> None:
    with running(tmp_path, small_config(run={"steps": 1})) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        swarm.produce(ann)
        assert held_back(swarm) > 0
        swarm.sweep()
        swarm.publish(1)
        assert swarm.client("x").status().run_state == "finished"
        assert held_back(swarm) == 0
        assert check(export(swarm)).findings == []


def test_a_restarted_coordinator_still_holds_back(swarm: Swarm, tmp_path: Path) -> None:
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    before = export(swarm)
    swarm.store.close()
    with running(swarm.root, swarm.run.config, swarm.clock) as again:
        assert facts_of(export(again)) == facts_of(before)


def test_a_recalled_batch_hides_nothing_that_was_public(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.work(ann)
    claim = swarm.claim()
    swarm.accept(claim, audited_groups=[])
    swarm.sweep()
    swarm.record(0)
    public = len(export(swarm))
    swarm.client("trainer").recall(api.RecallBody(step=0, reason="diverged"))
    assert ledger_kinds(swarm)[-1] == "recalled"
    assert len(export(swarm)) > public


def test_kept_heads_of_entries_that_are_held_back_accuse_nobody(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    public, everything = export(swarm), whole(swarm)
    made = len(everything) - 1
    inside, newest = head_of(everything, made - 1, at=1.0), head_of(everything, made, at=1.0)
    result = check(public, KeptEvidence(heads=[inside, newest], hashes=[inside.head, newest.head]))
    assert result.findings == []
    assert [note for note in result.notes if "1 kept heads are of entries that are not public yet" in note]
    assert [note for note in result.notes if inside.head[:12] in note]
    assert not [note for note in result.notes if newest.head[:12] in note]


def test_a_head_that_contradicts_the_seal_is_a_finding(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    public, everything = export(swarm), whole(swarm)
    made = len(everything) - 1
    other = head_of(everything, made, at=1.0).model_copy(update={"head": "e" * 64})
    (finding,) = check(public, KeptEvidence(heads=[other])).findings
    assert "rewritten" in finding.text
    beyond = other.model_copy(update={"entries": made + 1, "at": 1.0})
    (finding,) = check(public, KeptEvidence(heads=[beyond])).findings
    assert "the end was cut off" in finding.text


def test_a_receipt_may_wait_for_what_is_held_back_but_not_for_ever(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    receipt = open_evidence(Receipt, ann.submit(lease.lease_id, b"rollouts").receipt, COORDINATOR.public)
    swarm.accept()
    swarm.sweep()
    for step in range(1, 5):
        swarm.publish(step)
        swarm.produce(ann)
        swarm.sweep()
    facts = facts_of(export(swarm))
    hidden = [fact for fact in facts if fact["body"].get("lease") != lease.lease_id]
    lines = signed_again(hidden, at=NOW)
    seal = json.loads(json.loads(lines[-1])["payload"])
    extent = ledger.Extent(seal["entries"], seal["head"], seal["made"] + 5, "d" * 64)
    lines[-1] = ledger.seal(COORDINATOR, "run-1", extent, NOW)
    assert any("has a receipt" in finding.text for finding in check(lines, KeptEvidence(receipts=[receipt])).findings)
    fresh = receipt.model_copy(update={"lease": "another", "step": 2})
    assert not any("another" in finding.text for finding in check(lines, KeptEvidence(receipts=[fresh])).findings)


@pytest.mark.parametrize(("made", "newest"), [(-1, "head"), (0, "other")])
def test_a_seal_that_contradicts_itself_is_refused(swarm: Swarm, made: int, newest: str) -> None:
    swarm.join("ann")
    lines = whole(swarm)
    seal = json.loads(json.loads(lines[-1])["payload"])
    extent = ledger.Extent(
        seal["entries"], seal["head"], seal["made"] + made, seal["head"] if newest == "head" else "f" * 64
    )
    lines[-1] = ledger.seal(COORDINATOR, "run-1", extent, NOW)
    (finding,) = check(lines).findings
    assert "contradicts itself" in finding.text


def test_the_body_of_a_hidden_verdict_cannot_be_guessed_from_a_public_head(swarm: Swarm) -> None:
    (ann,) = swarm.join("ann")
    swarm.produce(ann)
    swarm.produce(ann)
    salts = [fact["body"]["salt"] for fact in facts_of(whole(swarm)) if fact["kind"] == "verdict"]
    assert len(set(salts)) == 2
    assert all(len(salt) == 32 for salt in salts)
