"""A ledger with a slot that two keys filled: its credit is paid once and divided, its re-audits are recorded, and it verifies."""

import json
from pathlib import Path

import pytest

from shoal.coordinator.ledger import Entry, balances, check_secrets, verify_export
from shoal.protocol.verdicts import Reason
from support.backups import CONFIG, two_files
from support.samples import keypair
from support.swarm import TOKENS_PER_GROUP, Swarm, running

SLOT_TOKENS = 2 * TOKENS_PER_GROUP


def entries(swarm: Swarm) -> list[Entry]:
    lines = swarm.whole_ledger().splitlines()
    return verify_export(lines, swarm.run.keypair.public)[0]


def bodies(found: list[Entry], kind: str) -> list[dict[str, object]]:
    return [json.loads(entry.body) for entry in found if entry.kind == kind]


def check(swarm: Swarm) -> list[Entry]:
    """The ledger verifies, its draws can be repeated, and its balances are those of the store."""
    found = entries(swarm)
    assert check_secrets(found) > 0
    accounts = balances(found)
    for row in swarm.all("SELECT key, credit_held, credit_released FROM workers"):
        account = accounts[str(row["key"])]
        assert (account["held"], account["released"]) == (row["credit_held"], row["credit_released"])
    return found


def paid(found: list[Entry]) -> int:
    return sum(account["held"] + account["released"] for account in balances(found).values())


def test_two_files_in_time_share_what_the_slot_pays(tmp_path: Path) -> None:
    with running(tmp_path, CONFIG) as swarm:
        two_files(swarm, changed=0, flips_allowed=0)
        found = check(swarm)
        slots = len(swarm.all("SELECT 1 FROM slots WHERE state='resolved'"))
        assert paid(found) == slots * SLOT_TOKENS, "each slot is paid once"
        moved = [body for body in bodies(found, "credit") if int(str(body["held"])) < 0]
        assert [body["held"] for body in moved] == [-SLOT_TOKENS // 2]


@pytest.mark.parametrize("forged", ["first", "second", "neither"])
def test_re_audits_of_both_files_are_in_the_ledger(tmp_path: Path, forged: str) -> None:
    with running(tmp_path, CONFIG) as swarm:
        _, first, second = two_files(swarm, changed=2, flips_allowed=0)
        names = {first: "first", second: "second"}
        before = len(bodies(entries(swarm), "verdict"))
        for _ in range(2):
            claim = swarm.claim()
            assert claim.audit_groups == [0, 1]
            if names[claim.submission_id] == forged:
                swarm.reject(Reason.SAMPLING, claim=claim)
            else:
                swarm.accept(claim)
        found = check(swarm)
        again = bodies(found, "verdict")[before:]
        assert len(again) == 2
        assert all(body["audit_drawn"] == [0, 1] for body in again)
        assert [body["accepted"] for body in again].count(False) == (forged != "neither")
        banned = {body["worker"] for body in bodies(found, "ban")}
        assert (keypair("eve").public in banned) == (forged == "first")
        assert len(banned) == (forged != "neither")
