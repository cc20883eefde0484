"""An operator with all keys: exports a ledger, changes what he likes, and signs the chain again."""

import json
from collections.abc import Callable
from typing import Any

from shoal.coordinator import ledger
from shoal.coordinator.ledger.chain import Entry, entry_hash, line_of
from shoal.coordinator.ledger.findings import Finding
from shoal.coordinator.ledger.kept import KeptEvidence
from shoal.coordinator.ledger.verification import Verification, verify_ledger
from shoal.protocol.evidence import LedgerHead
from support.samples import keypair
from support.swarm import Swarm

COORDINATOR = keypair("coordinator")
RUN_KEY = keypair("run").public
Facts = dict[str, Any]
"""Time, kind and body of an entry."""


def export(swarm: Swarm) -> list[bytes]:
    return swarm.client("x").ledger_export().splitlines()


def facts_of(lines: list[bytes]) -> list[Facts]:
    entries = [json.loads(line) for line in lines[:-1]]
    return [{"at": entry["at"], "kind": entry["kind"], "body": json.loads(entry["body"])} for entry in entries]


def signed_again(facts: list[Facts], at: float = 2_000_000.0) -> list[bytes]:
    """A whole, correctly signed export of these entries."""
    lines, previous = [], ledger.GENESIS
    for seq, fact in enumerate(facts):
        body = json.dumps(fact["body"], separators=(",", ":"))
        digest = entry_hash(seq, fact["at"], fact["kind"], body, previous)
        signature = COORDINATOR.sign(bytes.fromhex(digest))
        lines.append(line_of(Entry(seq, fact["at"], fact["kind"], body, previous, digest, signature)))
        previous = digest
    return [*lines, ledger.seal(COORDINATOR, "run-1", ledger.Extent(len(facts), previous, len(facts), previous), at)]


def check(lines: list[bytes], kept: KeptEvidence | None = None) -> Verification:
    return verify_ledger(lines, COORDINATOR.public, run_key=RUN_KEY, kept=kept)


def tampered(lines: list[bytes], change: Callable[[list[Facts]], None]) -> list[Finding]:
    """What is found after the operator changed the entries and signed the chain again."""
    facts = facts_of(lines)
    change(facts)
    return check(signed_again(facts)).findings


def number_of(lines: list[bytes], kind: str, which: int = 0, **body: object) -> int:
    """The number of an entry of this kind whose body has these facts."""
    found = [
        seq
        for seq, fact in enumerate(facts_of(lines))
        if fact["kind"] == kind and all(fact["body"].get(name) == value for name, value in body.items())
    ]
    return found[which]


def head_of(lines: list[bytes], entries: int, at: float = 1_500_000.0) -> LedgerHead:
    return LedgerHead(run_id="run-1", at=at, entries=entries, head=json.loads(lines[entries - 1])["hash"])
