"""Scores, writes and uploads finished slots in the background, several at a time, while the engine goes on.

A file is kept on disk until the coordinator has answered, so that finished work survives the death of the process: the next one
uploads what it finds. A slot that cannot be scored is given back, alone. What ends the worker arrives in the loop's inbox.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from pydantic import ValidationError

from shoal.errors import RefusedError, ShoalError, UnavailableError
from shoal.files import digest_bytes, write_atomic
from shoal.metrics import EventLog, Report
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.evidence_store import Receipts
from shoal.protocol.rollouts import Rollout
from shoal.worker.leases import FAILURES_IN_A_ROW, News
from shoal.worker.slots import Slot

AT_ONCE = 4
SUBMIT_AT_LEAST_S = 60.0
"""An upload is tried while its lease lasts, and so long if that is over: the coordinator says what becomes of it."""
LOST_WORK = {"lease_expired", "unknown_lease", "already_submitted"}
"""Refusals that cost one submission; any other ends the worker."""


@dataclass(frozen=True)
class Outbox:
    """Files that the coordinator has not taken yet, each with its lease."""

    folder: Path

    def keep(self, lease: api.Lease, data: bytes) -> None:
        write_atomic(self._path(lease, "parquet"), data)
        write_atomic(self._path(lease, "json"), lease.model_dump_json().encode())  # last: it makes the pair complete

    def drop(self, lease: api.Lease) -> None:
        self._path(lease, "json").unlink(missing_ok=True)
        self._path(lease, "parquet").unlink(missing_ok=True)

    def left(self) -> list[tuple[api.Lease, bytes]]:
        """What an earlier process left; what it had not finished writing is removed."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                lease = api.Lease.model_validate_json(path.read_bytes())
                found.append((lease, path.with_suffix(".parquet").read_bytes()))
            except (ValidationError, OSError):
                path.unlink(missing_ok=True)
        complete = {path.stem for path in self.folder.glob("*.json")}
        for path in self.folder.glob("*.parquet"):
            if path.stem not in complete:
                path.unlink(missing_ok=True)
        return found

    def _path(self, lease: api.Lease, kind: str) -> Path:
        return self.folder / f"{lease.step}-{lease.slot}-{lease.lease_id}.{kind}"


class Deliveries:
    def __init__(
        self,
        client: CoordinatorClient,
        *,
        score: Callable[[Slot], list[Rollout]],
        write: Callable[[Slot, Sequence[Rollout]], bytes],
        on_submitted: Callable[[api.Lease, int, int], None],
        give_back: Callable[[api.Lease], bool],
        outbox: Outbox | None,
        receipts: Receipts | None = None,
        inbox: "SimpleQueue[News]",
        metrics: EventLog,
        report: Report,
    ) -> None:
        self._client, self._outbox, self._inbox, self._receipts = client, outbox, inbox, receipts
        self._score, self._write, self._on_submitted, self._give_back = score, write, on_submitted, give_back
        self._metrics, self._report = metrics, report
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="delivery")
        self._lock = threading.Lock()
        self._pending = 0
        self._failures = 0

    @property
    def pending(self) -> int:
        """Slots that are being scored or uploaded, or wait for it."""
        return self._pending

    def begin(self, slot: Slot) -> None:
        self.run(lambda: self._deliver(slot))

    def give_back(self, lease: api.Lease) -> None:
        self.run(lambda: self._give_back(lease))

    def upload_left(self) -> None:
        """What an earlier process of this worker had finished and not submitted."""
        for lease, data in self._outbox.left() if self._outbox else ():
            self._report(f"uploading step {lease.step} slot {lease.slot}, which was finished before")
            self.run(partial(self._upload, lease, data, 0, 0))

    def finish(self) -> None:
        """Waits for everything; nothing can be begun after it."""
        self._threads.shutdown(wait=True)

    def run(self, job: Callable[[], object]) -> None:
        """Does something else that must not hold the engine up."""
        with self._lock:
            self._pending += 1
        self._threads.submit(job).add_done_callback(self._ended)

    def _ended(self, future: "Future[object]") -> None:
        with self._lock:
            self._pending -= 1
        error = future.exception()
        if isinstance(error, Exception):
            self._inbox.put(error)

    def _deliver(self, slot: Slot) -> None:
        try:
            rollouts = self._score(slot)
        except Exception as error:  # verifiers may be anybody's code: one bad answer must cost no more than its slot
            self._unscored(slot, error)
            return
        self._failures = 0
        data = self._write(slot, rollouts)
        if self._outbox is not None:
            self._outbox.keep(slot.lease, data)
        self._upload(slot.lease, data, len(rollouts), slot.tokens)

    def _unscored(self, slot: Slot, error: Exception) -> None:
        self._failures += 1
        what = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        self._report(f"{slot} could not be scored: {what}")
        self._give_back(slot.lease)
        if self._failures >= FAILURES_IN_A_ROW:
            raise error

    def _upload(self, lease: api.Lease, data: bytes, samples: int, tokens: int) -> None:
        try:
            left_s = max(SUBMIT_AT_LEAST_S, lease.expires_at - self._client.server_time())
            answer = self._client.submit(lease.lease_id, data, by_bucket=lease.by_bucket, deadline_s=left_s)
        except RefusedError as refusal:
            if refusal.code not in LOST_WORK:
                raise
            self._report(f"step {lease.step} slot {lease.slot} came too late: {refusal}")
        except UnavailableError as error:
            self._report(f"step {lease.step} slot {lease.slot} could not be submitted: {error}")
            return  # the file stays in the outbox: the next start tries again
        else:
            with self._lock:
                self._keep_receipt(lease, data, answer.receipt)
                self._on_submitted(lease, samples, tokens)
            self._metrics.event("submitted", step=lease.step, slot=lease.slot, size_bytes=len(data))
        if self._outbox is not None:
            self._outbox.drop(lease)

    def _keep_receipt(self, lease: api.Lease, data: bytes, receipt: str) -> None:
        problem = self._receipts.keep(receipt, lease.lease_id, digest_bytes(data)) if self._receipts else ""
        if problem:
            self._report(f"step {lease.step} slot {lease.slot}: {problem}")
