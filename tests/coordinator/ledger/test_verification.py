"""An operator with the coordinator's key rewrites the ledger: every kind of change is located."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.ledger.operator import (
    COORDINATOR,
    Facts,
    check,
    export,
    facts_of,
    head_of,
    number_of,
    signed_again,
    tampered,
)
from shoal.coordinator.ledger.kept import KeptEvidence
from shoal.coordinator.ledger.verification import verify_ledger
from shoal.protocol import api
from shoal.protocol.evidence import Receipt, open_evidence
from shoal.protocol.signing import restored_message, submission_message
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import Swarm, running, small_config

ANN, BOB, EVE = (keypair(name).public for name in ("ann", "bob", "eve"))


def busy(swarm: Swarm) -> list[str]:
    """Four steps with a cheater, a drifting key, an owner's ban that is lifted, and a key that lost a file; the receipts."""
    receipts: list[str] = []
    ann, bob, eve, dan = swarm.join("ann", "bob", "eve", "dan")

    def submit(name: str) -> api.Lease:
        client = {"ann": ann, "bob": bob, "eve": eve, "dan": dan}[name]
        lease = swarm.lease(client)
        answer = client.submit(lease.lease_id, f"rollouts of {lease.lease_id}".encode())
        receipts.append(answer.receipt)
        return lease

    swarm.publish(0)
    for step in range(4):
        swarm.clock.advance(5.0)
        if step == 1:
            submit("eve")
            swarm.reject(Reason.SAMPLING)
        if step == 2:
            submit("bob")
            swarm.reject(Reason.LOGPROBS)
            ban = api.BanBody(worker=ANN, reason="by mistake")
            swarm.client("run").ban(ban)
            swarm.client("run").unban(ban)
        if step == 3:
            submit("dan")
            swarm.accept(metrics=api.AuditMetrics(tokens=9, drift_llrs=[20.0]), useful=0)
        submit("ann")
        swarm.accept()
        swarm.publish(step + 1)
    return receipts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], list[Receipt]]:
    """One run for all tests, which only read its export and its receipts."""
    with running(tmp_path_factory.mktemp("busy"), small_config(run={"steps": 9})) as swarm:
        receipts = [open_evidence(Receipt, text, COORDINATOR.public) for text in busy(swarm)]
        return export(swarm), receipts


@pytest.fixture(scope="module")
def lines(run: tuple[list[bytes], list[Receipt]]) -> list[bytes]:
    return run[0]


def test_an_honest_ledger_holds(run: tuple[list[bytes], list[Receipt]]) -> None:
    lines, receipts = run
    kept = KeptEvidence(heads=[head_of(lines, 7), head_of(lines, len(lines) - 1)], receipts=receipts)
    result = check(lines, kept)
    assert result.findings == []
    assert (result.entries, result.verdicts) == (len(lines) - 1, len(receipts))
    assert {fact["kind"] for fact in facts_of(lines)} >= {"slash", "ban", "unban", "credit", "recorded", "commitment"}
    assert result.balances[ANN] == {"held": 30, "released": 20, "slashed": 30}
    assert check(signed_again(facts_of(lines))).findings == [], "the operator's tools change nothing by themselves"


def of(kind: str, which: int = 0, **body: object) -> Callable[[list[bytes]], int]:
    return lambda lines: number_of(lines, kind, which, **body)


def body_change(find: Callable[[list[bytes]], int], **values: object) -> Callable[[list[bytes], list[Facts]], None]:
    return lambda lines, facts: facts[find(lines)]["body"].update(values)


CHANGES: dict[str, tuple[Callable[[list[bytes]], int], dict[str, object], str]] = {
    "more credit": (of("credit"), {"held": 21}, "held is 21, not 20"),
    "released instead of held": (of("credit"), {"held": 0, "released": 20}, "held is 0, not 20"),
    "credit to somebody else": (of("credit"), {"worker": BOB}, "worker is"),
    "more tokens": (of("verdict"), {"tokens": 40}, ""),
    "more tokens than a slot has": (of("verdict"), {"tokens": 1000}, "1000 tokens are counted"),
    "a rejection made an acceptance": (of("verdict", worker=BOB), {"accepted": True, "use": "counts"}, ""),
    "an acceptance made a rejection": (of("verdict"), {"accepted": False, "use": "rejected"}, ""),
    "a proof made an anomaly": (of("verdict", worker=EVE), {"reasons": ["logprobs"]}, ""),
    "another proof than the ban names": (of("verdict", worker=EVE), {"reasons": ["commitment"]}, ""),
    "a fault instead of a reason": (of("verdict", worker=BOB), {"reasons": ["validator_crash"]}, "a fault"),
    "an unknown reason": (of("verdict", worker=BOB), {"reasons": ["malice"]}, "malformed"),
    "a smaller slash": (of("slash", worker=ANN), {"held": -10, "slashed": 10}, "held is -10"),
    "another cause of a ban": (of("ban", worker=EVE), {"by": "owner"}, "by is 'owner'"),
    "drift that nobody measured": (of("verdict"), {"drift": "cheating"}, ""),
    "a lower audit rate": (
        of("verdict", 1, worker=ANN),
        {"audit_rate": 0.1, "audit_drawn": []},
        "audit rate is 0.1",
    ),
    "fewer useful groups audited than the terms say": (
        of("terms"),
        {"trust": {"stake_tokens": 30, "probation_audits": 2, "audit_floor": 0.1, "unaudited_share": 0.1}},
        "the terms say 0.776",
    ),
    "useful groups that nobody audited": (of("verdict"), {"audited": [], "audit_drawn": [], "useful_rate": 1.0}, ""),
    "an audit that was not done": (of("verdict"), {"audited": []}, "without the audit"),
    "a file that was never received": (of("verdict"), {"file": "ab" * 32}, "did not sign this file"),
    "a lease of somebody else": (of("verdict"), {"lease": "cd" * 16}, "did not sign this file"),
    "another step's secret": (of("recorded"), {"step_secret": "ef" * 32}, "is not the one that entry"),
    "another commitment": (of("commitment"), {"commitment": "ef" * 32}, ""),
    "a group that nobody made": (of("recorded"), {"groups": ["0/0/0", "0/7/1"]}, "group 0/7/1"),
    "the same group again": (of("recorded", 1), {"groups": ["0/0/0", "1/1/1"]}, "group 0/0/0"),
    "another step": (of("recorded", 1), {"step": 2}, ""),
    "a version that was skipped": (of("version", 1), {"version": 2}, "does not follow"),
    "smaller slots": (of("terms"), {"slot_tokens": 5}, "a slot has at most 5"),
    "an unban of a key that is not banned": (of("unban"), {"worker": BOB}, "not banned"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_entry_is_located(name: str, lines: list[bytes]) -> None:
    find, values, text = CHANGES[name]
    number = find(lines)

    def change(facts: list[Facts]) -> None:
        facts[number]["body"].update(values)

    findings = tampered(lines, change)
    assert findings, "nothing was found"
    assert findings[0].entry >= number - 2
    assert findings[0].entry <= number + 2 or f"entry {number} " in findings[0].text or number == of("terms")(lines), (
        findings
    )
    assert any(text in finding.text for finding in findings), findings


def test_any_change_at_all_is_shown_by_a_head_that_was_kept_later(lines: list[bytes]) -> None:
    facts = facts_of(lines)
    number = number_of(lines, "verdict", worker=BOB)
    facts[number]["body"]["reasons"] = ["reward_tolerant"]  # an anomaly like the true one: nothing follows otherwise
    rewritten = signed_again(facts)
    assert not check(rewritten).findings, "a consistent lie of the one who decides shows only to those who remember"
    for entries in (number + 1, number + 5, len(facts)):
        (finding,) = check(rewritten, KeptEvidence(heads=[head_of(lines, entries)])).findings
        assert finding.entry == entries - 1
        assert "not in this chain" in finding.text
    assert not check(rewritten, KeptEvidence(heads=[head_of(lines, number)])).findings, "an older head still holds"
    (finding,) = check(rewritten, KeptEvidence(hashes=[head_of(lines, len(facts)).head])).findings
    assert "rewritten" in finding.text


@pytest.mark.parametrize("kind", ["credit", "slash", "ban", "verdict", "recorded", "commitment", "version", "terms"])
def test_an_entry_that_was_taken_out_and_signed_over_is_located(kind: str, lines: list[bytes]) -> None:
    number = number_of(lines, kind)

    def change(facts: list[Facts]) -> None:
        del facts[number]

    findings = tampered(lines, change)
    assert findings
    assert min(finding.entry for finding in findings) >= number - 1


def test_an_unwelcome_verdict_taken_out_with_all_that_follows_is_shown_by_its_receipt(
    run: tuple[list[bytes], list[Receipt]],
) -> None:
    lines, receipts = run
    facts = facts_of(lines)
    number = number_of(lines, "verdict", worker=BOB)
    lease = facts[number]["body"]["lease"]
    del facts[number]
    assert check(signed_again(facts)).findings, "the positions of later files give it away"
    for fact in facts[number:]:
        if fact["kind"] == "verdict":
            fact["body"]["position"] -= 1
    shortened = signed_again(facts)
    assert not check(shortened).findings, "nothing else depends on it"
    mine = [receipt for receipt in receipts if receipt.worker == BOB]
    # Its head is not in the chain any more only if it was made later; the missing verdict shows in any case.
    findings = check(shortened, KeptEvidence(receipts=mine)).findings
    assert any(lease in finding.text and "no verdict" in finding.text for finding in findings)


def test_a_receipt_is_not_overdue_while_a_batch_may_hold_its_file(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        lease = swarm.lease(ann)
        receipt = open_evidence(Receipt, ann.submit(lease.lease_id, b"file").receipt, COORDINATOR.public)
        result = check(export(swarm), KeptEvidence(receipts=[receipt]))
    assert result.ok
    assert result.notes == ["1 files with a receipt have no verdict yet; they are not overdue"]


def test_entries_in_another_order_are_located(lines: list[bytes]) -> None:
    first, second = number_of(lines, "credit", 1), number_of(lines, "recorded", 1)

    def change(facts: list[Facts]) -> None:
        facts[first], facts[second] = facts[second], facts[first]

    assert {finding.entry for finding in tampered(lines, change)} & {first, second}


def test_a_backdated_entry_is_located(lines: list[bytes]) -> None:
    number = number_of(lines, "recorded", 2)

    def change(facts: list[Facts]) -> None:
        facts[number]["at"] -= 3600

    (finding,) = tampered(lines, change)
    assert finding == (number, "the time is earlier than that of the entry before it")


def test_a_verdict_dated_before_its_file_arrived_is_located(run: tuple[list[bytes], list[Receipt]]) -> None:
    lines, receipts = run
    facts = facts_of(lines)
    for fact in facts:
        fact["at"] -= 7 * 3600
    findings = check(signed_again(facts), KeptEvidence(receipts=receipts)).findings
    assert sum("before the file arrived" in finding.text for finding in findings) == len(receipts)


def test_a_slot_that_is_paid_twice_is_located(lines: list[bytes]) -> None:
    number = number_of(lines, "verdict")

    def change(facts: list[Facts]) -> None:
        again = json.loads(json.dumps(facts[number]["body"])) | {"worker": BOB, "lease": "ab" * 16}
        again["signature"] = keypair("bob").sign(submission_message("run-1", again["lease"], again["file"]))
        at = facts[number + 1]["at"]
        credit = {"worker": BOB, "held": 20, "released": 0, "submission": "x"}
        facts[number + 2 : number + 2] = [
            {"at": at, "kind": "verdict", "body": again},
            {"at": at, "kind": "credit", "body": credit},
        ]

    findings = tampered(lines, change)
    assert any(finding.entry == number + 2 and "filled a second time" in finding.text for finding in findings)


def test_credit_out_of_nowhere_is_located(lines: list[bytes]) -> None:
    number = number_of(lines, "version", 2)

    def change(facts: list[Facts]) -> None:
        body = {"worker": BOB, "held": 20, "released": 0, "submission": "x"}
        facts.insert(number, {"at": facts[number]["at"], "kind": "credit", "body": body})

    assert tampered(lines, change)[0] == (number, "nothing calls for this credit entry")


def test_a_cut_end_shows_against_a_kept_head_and_a_newer_head_accuses_nobody(lines: list[bytes]) -> None:
    facts = facts_of(lines)
    end = number_of(lines, "version", 3)
    cut = signed_again(facts[:end], at=2_000_000.0)
    assert not check(cut).findings
    kept = KeptEvidence(heads=[head_of(lines, len(facts), at=1_500_000.0)])
    (finding,) = check(cut, kept).findings
    assert "the end was cut off" in finding.text
    older = signed_again(facts[:end], at=1_400_000.0)
    result = check(older, kept)
    assert result.ok
    assert "newer than this export" in result.notes[0]


def restored(facts: list[Facts], kept: int, *, made_at: float, at: float, by: str = "run") -> list[Facts]:
    """The run goes on from a backup of its first entries."""
    before = facts[:kept]
    head = json.loads(signed_again(before)[-2])["hash"]
    body: Facts = {"entries": kept, "head": head, "backup_made_at": made_at, "restored_at": at}
    body["signature"] = keypair(by).sign(restored_message("run-1", body))
    return [*before, {"at": at, "kind": "restored", "body": body}]


def test_a_restore_explains_the_heads_and_files_that_it_lost(run: tuple[list[bytes], list[Receipt]]) -> None:
    lines, receipts = run
    facts = facts_of(lines)
    kept = number_of(lines, "recorded", 1) + 1
    at = facts[-1]["at"] + 100
    again = signed_again(restored(facts, kept, made_at=facts[kept - 1]["at"], at=at))
    evidence = KeptEvidence(heads=[head_of(lines, len(facts), at=at - 50), head_of(lines, kept)], receipts=receipts)
    result = check(again, evidence)
    assert result.findings == []
    assert any(f"before the restore of entry {kept}" in note for note in result.notes)


def test_a_chain_that_went_on_beside_the_restored_one_is_a_fork(lines: list[bytes]) -> None:
    facts = facts_of(lines)
    again = signed_again(restored(facts, number_of(lines, "version", 1), made_at=0.0, at=1_000_100.0))
    late = head_of(lines, len(facts), at=1_000_100.0 + 7200)
    (finding,) = check(again, KeptEvidence(heads=[late])).findings
    assert "a fork" in finding.text


def test_a_restore_that_the_owner_did_not_sign_explains_nothing(lines: list[bytes]) -> None:
    facts = facts_of(lines)
    kept = number_of(lines, "version", 1)
    forged = restored(facts, kept, made_at=0.0, at=facts[-1]["at"] + 9, by="coordinator")
    assert check(signed_again(forged)).findings == [(kept, "the run key did not sign the restore")]
    moved = restored(facts, kept, made_at=0.0, at=facts[-1]["at"] + 9)
    del moved[5]
    assert (kept - 1, "the restore does not continue where its backup ended") in check(signed_again(moved)).findings


def test_what_was_not_checked_is_said(lines: list[bytes]) -> None:
    blind = verify_ledger(lines, COORDINATOR.public, key_is_known=False)
    assert [text.split(":")[0] for text in blind.unchecked] == [
        "whose signatures these are",
        "the run key",
        "whether the coordinator rewrote its own ledger, consistently and with its key",
        "whether verdicts were left out",
        "the verdicts themselves",
    ]
    seen = check(lines, KeptEvidence(heads=[head_of(lines, 9)]))
    assert not any("rewrote its own" in text for text in seen.unchecked)


def test_a_ledger_under_another_run_key_than_the_descriptor_names_is_found(lines: list[bytes]) -> None:
    result = verify_ledger(lines, COORDINATOR.public, run_key=BOB)
    assert result.findings[0] == (0, "the ledger names another run key than the descriptor")


def test_a_broken_chain_is_a_finding_and_no_crash(lines: list[bytes]) -> None:
    broken = [*lines[:5], b"{}", *lines[6:]]
    assert check(broken).findings == [(5, "This line is not a ledger entry.")]
    assert "truncated" in check(lines[:-1]).findings[0].text
    facts = facts_of(lines)
    for fact in facts:
        fact["body"] = {}
    assert len(check(signed_again(facts)).findings) >= 5


def test_the_receipt_of_an_upload_is_the_same_however_often_it_is_sent(tmp_path: Path) -> None:
    with running(tmp_path, small_config()) as swarm:
        swarm.publish(0)
        (ann,) = swarm.join("ann")
        lease = swarm.lease(ann)
        first = ann.submit(lease.lease_id, b"file")
        swarm.accept(claim=swarm.claim())
        assert ann.submit(lease.lease_id, b"file").receipt == first.receipt
        receipt = open_evidence(Receipt, first.receipt, COORDINATOR.public)
        assert (receipt.worker, receipt.lease, receipt.slot) == (ANN, lease.lease_id, lease.slot)
        assert check(export(swarm), KeptEvidence(receipts=[receipt])).ok
