"""The ledger: append-only, hash-chained, signed by the coordinator.

hash_n = BLAKE3(hash_{n−1} ‖ seq ‖ time ‖ kind ‖ body). An export ends with a signed (count, head), so that truncation and
rewriting show; every signed head.json carries the head too, so the coordinator cannot start over unnoticed.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from shoal.coordinator.rules import trust
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


ENTRY_TYPES: list[type] = [int, float, str, str, str, str, str]


def append(connection: Connection, keypair: Keypair, at: float, kind: str, **body: object) -> str:
    """Adds one entry inside the caller's transaction; returns the new head."""
    (count, previous), at = head(connection), float(at)  # the chain hashes what the store will give back
    text = json.dumps(body, separators=(",", ":"))
    entry_hash = _entry_hash(count, at, kind, text, previous)
    signature = keypair.sign(bytes.fromhex(entry_hash))
    insert(connection, Entry(count, at, kind, text, previous, entry_hash, signature))
    return entry_hash


def head(connection: Connection) -> tuple[int, str]:
    """Number of entries and hash of the last one."""
    last = find(connection, Entry, "WHERE seq = (SELECT MAX(seq) FROM ledger)")
    return (last.seq + 1, last.hash) if last else (0, GENESIS)


def page(connection: Connection, start: int, stop: int) -> list[bytes]:
    """The lines of entries start … stop−1. Entries never change, so an export may be read page by page."""
    entries = select(connection, Entry, "WHERE seq >= ? AND seq < ? ORDER BY seq", (start, stop))
    return [_line(entry) for entry in entries]


def seal(keypair: Keypair, run_id: str, count: int, last: str) -> bytes:
    payload = json.dumps({"run_id": run_id, "count": count, "head": last})
    return Envelope.seal(SEAL_KIND, payload, keypair).to_bytes() + b"\n"


def _line(entry: Entry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def verify_export(lines: Iterable[bytes], coordinator_key: str) -> tuple[list[Entry], str]:
    """Every entry and the run id, or LedgerError that names the first line which does not hold."""
    numbered = [line.removesuffix(b"\n") + b"\n" for line in lines if line]
    if not numbered:
        raise LedgerError("The ledger export is empty.")
    entries: list[Entry] = []
    previous = GENESIS
    for number, line in enumerate(numbered[:-1]):
        entry = _parse_entry(number, line)
        if (entry.seq, entry.previous) != (number, previous) or entry.hash != _entry_hash(
            number, entry.at, entry.kind, entry.body, previous
        ):
            raise LedgerError(f"Line {number + 1}: the entry does not continue the chain.")
        try:
            verify_signature(coordinator_key, bytes.fromhex(entry.hash), entry.signature)
        except SignatureError:
            raise LedgerError(f"Line {number + 1}: the entry is not signed by the coordinator.") from None
        entries.append(entry)
        previous = entry.hash
    return entries, _check_seal(numbered[-1], coordinator_key, len(entries), previous)


def check_draws(entries: Sequence[Entry]) -> int:
    """Repeats the audit draw of every verdict whose step's secret is published; how many there were, or LedgerError."""
    batches = [json.loads(entry.body) for entry in entries if entry.kind == "batch"]
    secrets = {body["step"]: bytes.fromhex(body["step_secret"]) for body in batches}
    repeated = 0
    for entry in entries:
        body = json.loads(entry.body) if entry.kind == "verdict" else {}
        if body.get("audit_step") not in secrets:
            continue
        drawn = trust.audited_groups(secrets[body["audit_step"]], body["file"], body["audit_rate"], body["groups"])
        if list(drawn) != body["audit_drawn"]:
            raise LedgerError(
                f"Line {entry.seq + 1}: the draw of step {body['audit_step']} says otherwise about an audit."
            )
        repeated += 1
    return repeated


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


def _entry_hash(seq: int, at: float, kind: str, body: str, previous: str) -> str:
    return digest_bytes("\n".join((previous, str(seq), repr(at), kind, body)).encode())


def _parse_entry(number: int, line: bytes) -> Entry:
    """An entry in the one spelling that an export uses, so that no byte of it can change unseen."""
    try:
        entry = Entry(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise LedgerError(f"Line {number + 1} is not a ledger entry.") from None
    if [type(value) for value in asdict(entry).values()] != ENTRY_TYPES or _line(entry) != line:
        raise LedgerError(f"Line {number + 1} is not a ledger entry.")
    return entry


def _check_seal(line: bytes, coordinator_key: str, count: int, last: str) -> str:
    try:
        envelope = Envelope.from_bytes(line)
        sealed = json.loads(envelope.open(SEAL_KIND, coordinator_key))
    except (IntegrityError, SignatureError):
        raise LedgerError("The export does not end with the coordinator's seal: it is truncated or forged.") from None
    if envelope.to_bytes() + b"\n" != line:
        raise LedgerError("The seal was rewritten.")
    if (sealed["count"], sealed["head"]) != (count, last):
        raise LedgerError(f"The seal speaks of {sealed['count']} entries, the export has {count}.")
    return str(sealed["run_id"])
