"""The ledger: append-only, hash-chained, signed by the coordinator.

hash_n = BLAKE3(hash_{n−1} ‖ seq ‖ time ‖ kind ‖ body). An export ends with a signed (count, head), so that truncation and
rewriting show; every signed head.json carries the head too, so the coordinator cannot start over unnoticed.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar, NamedTuple

from shoal.coordinator.ledger.secret_check import SecretCheck
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import Record, find, insert, select
from shoal.errors import IntegrityError, SignatureError
from shoal.files import digest_bytes
from shoal.identity import Envelope, Keypair, verify_signature

GENESIS = "0" * 64
SEAL_KIND = "ledger-seal"


class LedgerError(IntegrityError):
    """A ledger that is broken, truncated or signed by another key."""

    code = "ledger"

    def __init__(self, text: str, *, entry: int | None = None) -> None:
        """`entry` is the number of the entry that does not hold."""
        self.entry, self.text = entry, text
        super().__init__(text if entry is None else f"Entry {entry}: {text}")


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """One entry; an export has the same fields in the same order."""

    table: ClassVar[str] = "ledger"
    key_columns: ClassVar[tuple[str, ...]] = ("seq",)

    seq: int
    at: float
    kind: str
    body: str
    previous: str
    hash: str
    signature: str


class Extent(NamedTuple):
    """How much of a ledger an export holds: the first entries, their head, and what was made in all."""

    entries: int
    head: str
    made: int
    newest: str
    """Hash of the last entry that was made."""


ENTRY_TYPES: list[type] = [int, float, str, str, str, str, str]


def append(connection: Connection, keypair: Keypair, at: float, kind: str, **body: object) -> str:
    """Adds one entry inside the caller's transaction; returns the new head."""
    last = _last(connection)
    count, previous = (last.seq + 1, last.hash) if last else (0, GENESIS)
    at = (
        max(float(at), last.at) if last else float(at)
    )  # a clock that is set back, or another host's, dates nothing earlier
    text = json.dumps(body, separators=(",", ":"))
    digest = entry_hash(count, at, kind, text, previous)
    signature = keypair.sign(bytes.fromhex(digest))
    insert(connection, Entry(count, at, kind, text, previous, digest, signature))
    return digest


def head(connection: Connection) -> tuple[int, str]:
    """Number of entries and hash of the last one."""
    last = _last(connection)
    return (last.seq + 1, last.hash) if last else (0, GENESIS)


def whole(connection: Connection) -> Extent:
    count, last = head(connection)
    return Extent(count, last, count, last)


def hash_at(connection: Connection, entries: int) -> str:
    """The head of the first entries, this many; empty if there are fewer."""
    if entries == 0:
        return GENESIS
    entry = find(connection, Entry, "WHERE seq=?", (entries - 1,))
    return entry.hash if entry else ""


def _last(connection: Connection) -> Entry | None:
    return find(connection, Entry, "WHERE seq = (SELECT MAX(seq) FROM ledger)")


def page(connection: Connection, start: int, stop: int) -> list[bytes]:
    """The lines of entries start … stop−1. Entries never change, so an export may be read page by page."""
    entries = select(connection, Entry, "WHERE seq >= ? AND seq < ? ORDER BY seq", (start, stop))
    return [line_of(entry) for entry in entries]


def seal(keypair: Keypair, run_id: str, extent: Extent, at: float) -> bytes:
    """The end of an export that is made at this time."""
    payload = json.dumps({"run_id": run_id, **extent._asdict(), "at": at})
    return Envelope.seal(SEAL_KIND, payload, keypair).to_bytes() + b"\n"


def line_of(entry: Entry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def verify_export(lines: Iterable[bytes], coordinator_key: str) -> tuple[list[Entry], str]:
    """Every entry and the run id, or LedgerError that names the first entry which does not hold."""
    reader = LedgerReader(coordinator_key)
    return list(reader.read(lines)), reader.run_id


class LedgerReader:
    """Reads an export line by line: each entry continues the chain and is signed, and a signed seal ends it."""

    def __init__(self, coordinator_key: str) -> None:
        self.key = coordinator_key
        self.entries, self.head, self.previous_at = 0, GENESIS, 0.0
        self.is_sealed, self.run_id, self.sealed_at = False, "", 0.0
        self.extent = Extent(0, GENESIS, 0, GENESIS)
        """What the seal says of the ledger, once it is read."""

    def read(self, lines: Iterable[bytes]) -> Iterator[Entry]:
        line = b""
        for following in lines:
            if not following:
                continue
            if line:
                entry = self._entry(line)
                yield entry
                self.entries, self.head, self.previous_at = self.entries + 1, entry.hash, entry.at
            line = following.removesuffix(b"\n") + b"\n"
        if not line:
            raise LedgerError("The ledger export is empty.")
        self._check_seal(line)

    def _entry(self, line: bytes) -> Entry:
        entry = _parse_entry(self.entries, line)
        expected = entry_hash(self.entries, entry.at, entry.kind, entry.body, self.head)
        if (entry.seq, entry.previous, entry.hash) != (self.entries, self.head, expected):
            raise LedgerError("The entry does not continue the chain.", entry=self.entries)
        try:
            verify_signature(self.key, bytes.fromhex(entry.hash), entry.signature)
        except SignatureError:
            raise LedgerError("The entry is not signed by the coordinator.", entry=self.entries) from None
        return entry

    def _check_seal(self, line: bytes) -> None:
        try:
            envelope = Envelope.from_bytes(line)
            sealed = json.loads(envelope.open(SEAL_KIND, self.key))
            extent = Extent(*(sealed[name] for name in Extent._fields))
        except (IntegrityError, SignatureError, KeyError):
            text = "The export does not end with the coordinator's seal: it is truncated or forged."
            raise LedgerError(text) from None
        if envelope.to_bytes() + b"\n" != line:
            raise LedgerError("The seal was rewritten.")
        if (extent.entries, extent.head) != (self.entries, self.head):
            raise LedgerError(f"The seal speaks of {extent.entries} entries, the export has {self.entries}.")
        if extent.made < extent.entries or (extent.made == extent.entries and extent.newest != extent.head):
            raise LedgerError("The seal contradicts itself about the newest entry.")
        self.extent = extent
        self.run_id, self.sealed_at, self.is_sealed = str(sealed["run_id"]), float(sealed["at"]), True


def check_secrets(entries: Iterable[Entry]) -> int:
    """Holds published secrets to their commitments and repeats the audit draws; how many there were, or LedgerError."""
    check = SecretCheck()
    for entry in entries:
        for finding in check.take(entry.seq, entry.kind, json.loads(entry.body)):
            raise LedgerError(f"{finding.text}.", entry=finding.entry)
    return check.repeated


def balances(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Held, released and slashed credit per key, derived from the entries alone."""
    result: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry.kind not in ("credit", "slash"):
            continue
        body = json.loads(entry.body)
        account = result.setdefault(body["worker"], {"held": 0, "released": 0, "slashed": 0})
        for name in account:
            account[name] += int(body.get(name, 0))
    return result


def entry_hash(seq: int, at: float, kind: str, body: str, previous: str) -> str:
    return digest_bytes("\n".join((previous, str(seq), repr(at), kind, body)).encode())


def _parse_entry(number: int, line: bytes) -> Entry:
    """An entry in the one spelling that an export uses, so that no byte of it can change unseen."""
    try:
        entry = Entry(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise LedgerError("This line is not a ledger entry.", entry=number) from None
    if [type(value) for value in asdict(entry).values()] != ENTRY_TYPES or line_of(entry) != line:
        raise LedgerError("This line is not a ledger entry.", entry=number)
    return entry
