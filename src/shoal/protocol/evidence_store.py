"""Where a worker or relay keeps what the coordinator signed: heads of the ledger, and receipts for its uploads.

Heads are thinned as they age, so that the file stays small however long a run lasts; a head that contradicts an earlier one is kept
apart, both of them, for good. Receipts are appended, one line each, and synced.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.errors import IntegrityError, SignatureError
from shoal.files import write_atomic
from shoal.protocol.evidence import HEADS_FILE, RECEIPTS_FILE, LedgerHead, Receipt, open_evidence

CONFLICTS_FILE = "ledger-conflicts.jsonl"
MAX_HEADS = 128
RECENT_HEADS = 64
"""Of these none is dropped."""
SAVE_EVERY_S = 30.0


class KeptHeads:
    """The heads that were seen, oldest first."""

    def __init__(
        self, root: Path, run_id: str, coordinator_key: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._run_id, self._key, self._clock = root, run_id, coordinator_key, clock
        self._saved_at = -SAVE_EVERY_S
        self._kept = self._load()

    @property
    def newest(self) -> str:
        """The newest head as it was signed; empty before the first."""
        return self._kept[-1].line if self._kept else ""

    def keep(self, text: str) -> str:
        """Keeps a head; returns what is wrong with it in one sentence, or nothing."""
        if not text or text == self.newest:
            return ""
        try:
            head = open_evidence(LedgerHead, text, self._key)
        except (IntegrityError, SignatureError) as error:
            return f"the head of the ledger is not signed by the coordinator: {error}"
        if head.run_id != self._run_id:
            return f"the head of the ledger belongs to run {head.run_id}"
        problem = self._contradiction(head)
        if problem:
            _append(self._root / CONFLICTS_FILE, self.newest, text)
        self._kept = thinned([*self._kept, Kept(head.entries, text)])
        if problem or self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()
        return problem

    def save(self) -> None:
        if self._kept:
            write_atomic(self._root / HEADS_FILE, "".join(f"{one.line}\n" for one in self._kept).encode())
        self._saved_at = self._clock()

    def _contradiction(self, head: LedgerHead) -> str:
        if not self._kept:
            return ""
        before = open_evidence(LedgerHead, self.newest, self._key)
        if head.entries < before.entries and head.at >= before.at:
            lengths = f"it had {before.entries} entries and now has {head.entries}"
            return f"the ledger became shorter: {lengths}; it was restored from a backup, or rewritten"
        if head.entries == before.entries and head.head != before.head:
            return f"the ledger shows two different heads of {head.entries} entries"
        return ""

    def _load(self) -> list["Kept"]:
        """What an earlier process kept of this run; a line that a kill cut off is dropped."""
        try:
            lines = (self._root / HEADS_FILE).read_text().splitlines()
        except (FileNotFoundError, UnicodeError):
            return []
        opened = [(self._open(line), line) for line in lines]
        return [Kept(head.entries, line) for head, line in opened if head is not None and head.run_id == self._run_id]

    def _open(self, line: str) -> LedgerHead | None:
        try:
            return open_evidence(LedgerHead, line, self._key)
        except (IntegrityError, SignatureError):
            return None


class Kept(NamedTuple):
    entries: int
    line: str


def thinned(kept: list[Kept]) -> list[Kept]:
    """Of too many heads the old one goes that leaves the smallest gap; the first and the recent ones stay."""
    if len(kept) <= MAX_HEADS:
        return kept
    old = range(1, len(kept) - RECENT_HEADS)
    spare = min(old, key=lambda place: kept[place + 1].entries - kept[place - 1].entries)
    return [*kept[:spare], *kept[spare + 1 :]]


class Receipts:
    """The receipts of one worker in one run."""

    def __init__(self, root: Path, run_id: str, coordinator_key: str, worker_key: str) -> None:
        self._path, self._run_id, self._key, self._worker = root / RECEIPTS_FILE, run_id, coordinator_key, worker_key

    def keep(self, text: str, lease_id: str, file_digest: str) -> str:
        """Keeps the receipt of an upload; returns what is wrong with it in one sentence, or nothing."""
        if not text:
            return "the coordinator gave no receipt for the upload"
        try:
            receipt = open_evidence(Receipt, text, self._key)
        except (IntegrityError, SignatureError) as error:
            return f"the receipt of the upload is not signed by the coordinator: {error}"
        expected = (self._run_id, self._worker, lease_id, file_digest)
        if (receipt.run_id, receipt.worker, receipt.lease, receipt.file) != expected:
            return "the receipt of the upload is for another file"
        _append(self._path, text)
        return ""


def _append(path: Path, *lines: str) -> None:
    """Adds whole lines at the end; one that a kill cut off before is ended first."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())
