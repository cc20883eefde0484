"""The ledger, a page of entries at a time, and how far this process has checked it. Reads only.

Entries of steps that are still open are shown to the owner alone.
"""

import json
from dataclasses import dataclass, field

from shoal.coordinator import ledger
from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.run import Run
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import select
from shoal.errors import SignatureError
from shoal.identity import verify_signature
from shoal.protocol.page_views import LedgerAddress, LedgerEntryView, LedgerPage

CHECKED_AT_ONCE = 2000
"""Entries that one request checks at most; about 100 µs each."""


@dataclass
class LedgerCheck:
    """Checks chain and signatures once per entry, some at a time."""

    coordinator_key: str
    checked: int = 0
    last_hash: str = field(default=ledger.GENESIS)
    problem: str = ""

    def go_on(self, connection: Connection) -> None:
        if self.problem:
            return
        stop = self.checked + CHECKED_AT_ONCE
        for entry in select(connection, ledger.Entry, "WHERE seq >= ? AND seq < ? ORDER BY seq", (self.checked, stop)):
            if not self._holds(entry):
                self.problem = f"Entry {entry.seq} does not continue the chain, or is not signed by the coordinator."
                return
            self.checked, self.last_hash = self.checked + 1, entry.hash

    def _holds(self, entry: ledger.Entry) -> bool:
        expected = ledger.entry_hash(entry.seq, entry.at, entry.kind, entry.body, self.last_hash)
        try:
            verify_signature(self.coordinator_key, bytes.fromhex(entry.hash), entry.signature)
        except (SignatureError, ValueError):
            return False
        return (entry.seq, entry.previous, entry.hash) == (self.checked, self.last_hash, expected)


def ledger_page(
    connection: Connection, run: Run, check: LedgerCheck, extent: ledger.Extent, address: LedgerAddress
) -> LedgerPage:
    """Entries of the part that the caller may read."""
    check.go_on(connection)
    stop = extent.entries if address.before is None else min(extent.entries, address.before)
    rows = select(
        connection,
        ledger.Entry,
        "WHERE seq < ? AND seq >= ? ORDER BY seq DESC",
        (stop, max(0, stop - address.limit)),
    )
    clock = meta.run_clock(connection)
    return LedgerPage(
        entries=[_view(row, clock) for row in rows],
        total=extent.made,
        shown=extent.entries,
        head=extent.newest,
        coordinator_key=run.descriptor.coordinator_key,
        verified_entries=check.checked,
        problem=check.problem,
    )


def _view(entry: ledger.Entry, clock: RunClock) -> LedgerEntryView:
    return LedgerEntryView(
        seq=entry.seq,
        at_s=round(clock.at_s(entry.at), 1),
        kind=entry.kind,
        body=json.loads(entry.body),
        hash=entry.hash,
    )
