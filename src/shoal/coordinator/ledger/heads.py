"""Signed heads for others to keep, and what the chain says to a head that somebody kept.

A head is signed once, when it is first asked for. A reported head that this key signed and that the chain does not have was lost by
a restore, or the ledger was rewritten or forked: the event log says which, once per head.
"""

import json
from typing import Literal

from shoal.coordinator.ledger import chain
from shoal.coordinator.ledger.chain import Entry
from shoal.coordinator.ledger.kept import CLOCK_SLACK_S
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import select
from shoal.errors import IntegrityError, SignatureError
from shoal.protocol.evidence import LedgerHead, open_evidence, seal

HeadState = Literal["known", "restored", "unknown"]
REMEMBERED = 1024


class Heads:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._sealed = ("", "")
        self._reported: set[str] = set()

    def newest(self, connection: Connection) -> str:
        entries, head = chain.head(connection)
        if self._sealed[0] != head:
            run = self._run
            evidence = LedgerHead(run_id=run.descriptor.run_id, at=run.clock(), entries=entries, head=head)
            self._sealed = head, seal(evidence, run.keypair)
        return self._sealed[1]

    def state_of(self, connection: Connection, text: str, key: str) -> HeadState:
        """Whether the chain has a head that a worker kept; made-up heads are of no interest."""
        if not text or text == self._sealed[1]:
            return "known"
        try:
            head = LedgerHead.model_validate_json(str(json.loads(text)["payload"]))
            if chain.hash_at(connection, head.entries) == head.head:
                return "known"
            head = open_evidence(LedgerHead, text, self._run.keypair.public)
        except (ValueError, KeyError, TypeError, RecursionError, IntegrityError, SignatureError):
            return "known"
        if head.run_id != self._run.descriptor.run_id:
            return "known"
        state: HeadState = "restored" if _is_lost(connection, head) else "unknown"
        if head.head not in self._reported and len(self._reported) < REMEMBERED:
            self._reported.add(head.head)
            self._run.metrics.event(
                "ledger_conflict", state=state, worker=key, entries=head.entries, head=head.head, signed_at=head.at
            )
        return state


def _is_lost(connection: Connection, head: LedgerHead) -> bool:
    restores = select(connection, Entry, "WHERE kind='restored' AND seq < ?", (head.entries,))
    return any(head.at <= float(json.loads(entry.body)["restored_at"]) + CLOCK_SLACK_S for entry in restores)
