"""Everything that an exported ledger can be held to, in one pass over its lines.

Chain, numbers, times and signatures; secrets against their commitments, and every audit draw; trust, credit and batches against
verdicts; verdicts against the signature of the worker that made the file; restores and rewinds against the run key; all of it
against heads and receipts that others have kept. The result names each entry that does not hold, and what could not be checked.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shoal.coordinator.ledger.books import Books
from shoal.coordinator.ledger.chain import Entry, LedgerError, LedgerReader
from shoal.coordinator.ledger.findings import Body, Finding
from shoal.coordinator.ledger.kept import KeptCheck, KeptEvidence
from shoal.coordinator.ledger.secret_check import SecretCheck
from shoal.errors import SignatureError
from shoal.identity import verify_signature
from shoal.protocol.signing import restored_message, rewound_message, submission_message


@dataclass
class Verification:
    """What was found, what was not checked, and what the ledger amounts to."""

    run_id: str = ""
    entries: int = 0
    head: str = ""
    key: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and no finding."""
    unchecked: list[str] = field(default_factory=list)
    balances: dict[str, dict[str, int]] = field(default_factory=dict)
    verdicts: int = 0
    draws: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings


def verify_ledger(
    lines: Iterable[bytes],
    key: str,
    *,
    key_is_known: bool = True,
    run_key: str | None = None,
    kept: KeptEvidence | None = None,
) -> Verification:
    """Checks an export that this key signed; whether it is the coordinator's is for the caller to know and to say."""
    return _Pass(key, key_is_known, run_key, kept or KeptEvidence()).run(lines)


class _Pass:
    def __init__(self, key: str, key_is_known: bool, run_key: str | None, kept: KeptEvidence) -> None:
        self.result = Verification()
        self.key_is_known, self.run_key, self.known_run_key = key_is_known, run_key, run_key
        self.reader = LedgerReader(key)
        self.books, self.secrets = Books(), SecretCheck()
        self.kept = KeptCheck(kept)

    def run(self, lines: Iterable[bytes]) -> Verification:
        try:
            for entry in self.reader.read(lines):
                self.result.findings.extend(self._take(entry))
        except LedgerError as error:
            self.result.findings.append(
                Finding(self.reader.entries if error.entry is None else error.entry, error.text)
            )
        self._finish()
        return self.result

    def _take(self, entry: Entry) -> Iterator[Finding]:
        body = json.loads(entry.body)
        if entry.at < self.reader.previous_at:
            yield Finding(entry.seq, "the time is earlier than that of the entry before it")
        yield from self._signed(entry, body)
        try:
            yield from self.secrets.take(entry.seq, entry.kind, body)
            yield from self.books.take(entry.seq, entry.kind, body)
            yield from self.kept.take(entry, body)
        except (KeyError, TypeError, ValueError) as error:
            yield Finding(entry.seq, f"this {entry.kind} entry lacks a fact or has a malformed one ({error})")

    def _signed(self, entry: Entry, body: Body) -> Iterator[Finding]:
        """Statements of others inside an entry: a worker's about its file, the owner's about a restore or a rewind."""
        if entry.kind == "run":
            self.result.run_id = str(body.get("run_id"))
            if self.run_key is not None and body.get("run_key") != self.run_key:
                yield Finding(entry.seq, "the ledger names another run key than the descriptor")
            self.known_run_key = self.run_key or str(body.get("run_key"))
        elif entry.kind == "verdict":
            message = submission_message(self.result.run_id, str(body.get("lease")), str(body.get("file")))
            yield from _signature(entry, body, str(body.get("worker")), message, "the worker did not sign this file")
        elif entry.kind == "restored":
            yield from self._restored(entry, body)
        elif entry.kind == "rewound":
            yield from self._rewound(entry, body)

    def _rewound(self, entry: Entry, body: Body) -> Iterator[Finding]:
        epoch, version, manifest = (str(body.get(name)) for name in ("epoch", "version", "manifest"))
        message = rewound_message(self.result.run_id, epoch, version, manifest)
        yield from _signature(entry, body, self.known_run_key or "", message, "the run key did not sign the rewind")
        self.result.notes.append(
            f"entry {entry.seq}: the owner returned the run to version {version} (epoch {epoch});"
            f" versions up to {body.get('newest_before')} are void"
        )

    def _restored(self, entry: Entry, body: Body) -> Iterator[Finding]:
        message = restored_message(self.result.run_id, body)
        yield from _signature(entry, body, self.known_run_key or "", message, "the run key did not sign the restore")
        if (body.get("entries"), body.get("head")) != (entry.seq, entry.previous):
            yield Finding(entry.seq, "the restore does not continue where its backup ended")

    def _finish(self) -> None:
        result, reader = self.result, self.reader
        result.run_id = result.run_id or reader.run_id
        result.entries, result.head, result.key = reader.entries, reader.head, reader.key
        result.verdicts, result.draws = self.books.verdicts, self.secrets.repeated
        result.balances = self.books.balances()
        if reader.is_sealed:
            if reader.run_id != result.run_id and result.entries:
                result.findings.append(Finding(result.entries - 1, f"the seal is of run {reader.run_id}"))
            result.findings.extend(self.books.finish(max(result.entries - 1, 0)))
            result.findings.extend(self.kept.finish(reader.extent, reader.sealed_at))
        result.notes.extend(self.kept.notes)
        result.unchecked.extend(self._unchecked())

    def _unchecked(self) -> Iterator[str]:
        if not self.key_is_known:
            yield (
                "whose signatures these are: the key was taken from the export itself; anyone can make one with a key of"
                " their own. Give --coordinator-key or --descriptor."
            )
        if self.run_key is None:
            yield "the run key: it was taken from the first entry. Give --descriptor."
        yield from self.kept.unchecked()
        if held_back := self.reader.extent.made - self.reader.extent.entries:
            yield f"the newest {held_back} entries: they are not public before the batches of their steps are recorded."
        if self.secrets.waiting:
            yield f"{self.secrets.waiting} audit draws: the secrets of their steps are not public yet."
        yield "the verdicts themselves: `shoal verify` repeats one from its rollout file."


def _signature(entry: Entry, body: Body, key: str, message: bytes, problem: str) -> Iterator[Finding]:
    try:
        verify_signature(key, message, str(body.get("signature")))
    except SignatureError:
        yield Finding(entry.seq, problem)
