"""`shoal ledger verify`: where the ledger, the keys and the kept evidence come from, and the result as sentences or JSON.

An exported file is read line by line, twice: its last line first, for the key, then all of it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.coordinator import LedgerError
from shoal.coordinator.ledger.kept import KeptEvidence
from shoal.coordinator.ledger.verification import Verification, verify_ledger
from shoal.errors import ConfigError, IntegrityError, SignatureError
from shoal.identity import Envelope
from shoal.observe.words import plural, printable
from shoal.owner.control import find_run
from shoal.protocol.descriptor import RunDescriptor, open_descriptor
from shoal.protocol.evidence import HEADS_FILE, KINDS, RECEIPTS_FILE, Kind, LedgerHead, Receipt, open_evidence
from shoal.rundir import is_address

HASH = re.compile(r"[0-9a-f]{64}")
SEAL_BYTES = 1 << 16
"""A seal is shorter than this."""
SHOWN_FINDINGS = 50


def check_ledger(
    where: str, coordinator_key: str | None, descriptor: Path | None, heads: Sequence[str], receipts: Sequence[Path]
) -> Verification:
    run = _descriptor(descriptor)
    if run is not None and coordinator_key not in (None, run.coordinator_key):
        raise ConfigError("--coordinator-key and --descriptor name different keys.")
    known_key = coordinator_key or (run.coordinator_key if run is not None else None)
    lines = ledger_source(where)
    key = known_key or seal_key(where, lines)
    kept = read_evidence(key, heads, receipts)
    run_key = run.run_key if run is not None else None
    return verify_ledger(lines, key, key_is_known=known_key is not None, run_key=run_key, kept=kept)


def ledger_source(where: str) -> Iterable[bytes]:
    """The lines of an exported file, which are read as they are needed, or of a run."""
    if is_address(where) or Path(where).is_dir() or where.endswith(".toml"):
        return find_run(where).ledger().splitlines()
    try:
        if not Path(where).stat().st_size:
            raise ConfigError(f"{where} is empty.")
        return _Lines(Path(where))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from None


class _Lines:
    """The lines of a file, from its beginning each time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def last(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SEAL_BYTES))
            return file.read().rstrip(b"\n").rsplit(b"\n", 1)[-1]


def seal_key(where: str, lines: Iterable[bytes]) -> str:
    """The key that an export says it is signed with."""
    last = lines.last() if isinstance(lines, _Lines) else list(lines)[-1]
    try:
        return Envelope.from_bytes(last).key
    except IntegrityError:
        raise LedgerError("The export does not end with a seal: it is truncated, or not a ledger export.") from None


def read_evidence(key: str, heads: Sequence[str], receipts: Sequence[Path]) -> KeptEvidence:
    """What was kept, with its signatures checked: evidence that the coordinator did not sign proves nothing."""
    kept = KeptEvidence()
    for head in heads:
        if HASH.fullmatch(head):
            kept.hashes.append(head)
        else:
            kept.heads += _read(_inside(Path(head), HEADS_FILE), LedgerHead, key)
    for path in receipts:
        kept.receipts += _read(_inside(path, RECEIPTS_FILE), Receipt, key)
        kept.heads += _read(path / HEADS_FILE, LedgerHead, key) if (path / HEADS_FILE).exists() else []
    return kept


def _inside(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _read(path: Path, kind: type[Kind], key: str) -> list[Kind]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    found: list[Kind] = []
    for number, line in enumerate(lines):
        try:
            found.append(open_evidence(kind, line, key))
        except (IntegrityError, SignatureError) as error:
            if number == len(lines) - 1 and not line.endswith("}"):
                continue  # cut off by a kill
            raise ConfigError(
                f"Line {number + 1} of {path} is no {KINDS[kind]} of this coordinator: {error}",
                hint="Is it of another run? Evidence that the coordinator did not sign proves nothing.",
            ) from None
    return found


def _descriptor(path: Path | None) -> RunDescriptor | None:
    if path is None:
        return None
    try:
        return open_descriptor(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def sentences_of(result: Verification) -> Iterator[str]:
    """The result as a person reads it."""
    if result.ok:
        yield (f"ok: {result.entries} entries of run {result.run_id}, signed by {result.key[:12]}…, head {result.head}")
        yield f"ok: {plural(result.verdicts, 'verdict')}, their credit, stakes, bans and batches recomputed"
        yield f"ok: {result.draws} audit draws repeated with secrets that were committed to before their steps"
    for finding in result.findings[:SHOWN_FINDINGS]:
        yield printable(f"entry {finding.entry}: {finding.text}")
    if len(result.findings) > SHOWN_FINDINGS:
        yield f"and {len(result.findings) - SHOWN_FINDINGS} more"
    for note in result.notes:
        yield printable(f"note: {note}")
    for text in result.unchecked:
        yield printable(f"not checked: {text}")
    if not result.ok:
        yield f"{plural(len(result.findings), 'finding')} in {result.entries} entries of run {printable(result.run_id)}"


def json_of(result: Verification) -> str:
    return json.dumps(
        {
            "ok": result.ok,
            "run_id": result.run_id,
            "entries": result.entries,
            "head": result.head,
            "key": result.key,
            "verdicts": result.verdicts,
            "draws": result.draws,
            "findings": [finding._asdict() for finding in result.findings],
            "notes": result.notes,
            "unchecked": result.unchecked,
            "balances": result.balances,
        }
    )
