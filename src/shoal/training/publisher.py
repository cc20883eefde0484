"""Publishes versions beside the training: one at a time, in order, each staged, then recorded, then ended.

The trainer hands over a snapshot of its weights and goes on; a thread copies, compares, compresses, hashes and signs (code that
runs without Python's global lock), records the version with the coordinator and announces it. The copy must not change until
`wait` returns, so the next one waits for this one. After a failure nothing is published any more: `wait` and `check` raise it.
Killed at any point, a trainer repeats the step with the same bits; origin and coordinator refuse other bytes under its number.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shoal.broadcast import Origin, Publication, WireTensor
from shoal.errors import IntegrityError, RefusedError, ShoalError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.training.snapshots import Snapshot

INTERRUPTED_WAIT_S = 5.0
"""A trainer that was interrupted may soon be killed; what is lost then is repeated with the same bits."""


class RepeatedStepError(ShoalError):
    """A step that was trained again gave other weights than those that the swarm already has."""

    code = "repeated_step"
    permanent = True


def _other_weights(version: int, error: ShoalError) -> RepeatedStepError:
    return RepeatedStepError(
        f"Version {version} is already published, and repeating its step gave other weights ({error.message})",
        hint="A trainer that resumes repeats the steps since its last checkpoint, bit for bit. Undo what has changed "
        "since (settings in [training], torch, threads, device) until it has passed the newest published version, "
        "and change it then. Where steps do not repeat, `shoal run rewind` returns the run to its last checkpoint and "
        "voids the versions after it; `shoal train --auto-rewind` does so by itself.",
    )


@dataclass(frozen=True)
class Version:
    """What the trainer hands over."""

    number: int
    snapshot: Snapshot
    metrics: Mapping[str, Any]
    """Of the step that made it; empty if none did."""
    waited_s: float = 0.0
    """How long training stood still until the version before was out and this one was handed over."""

    @property
    def standstill_s(self) -> float:
        """With the time that training waited for the copy before it changed the weights."""
        return self.waited_s + self.snapshot.stood_still_s


@dataclass(frozen=True)
class Published:
    version: Version
    publication: Publication
    stage_s: float
    announce_s: float
    """Recording included."""
    files_collected: int


class Publishing:
    """One version on its way."""

    def __init__(self, version: Version, *, held: bool) -> None:
        self.version = version
        self.recorded: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._may_announce = threading.Event()
        self._is_withdrawn = False
        if not held:
            self.release()

    def is_recorded(self) -> bool:
        """Waits until the coordinator has recorded it; False if that failed."""
        return self.recorded.exception() is None

    def release(self) -> None:
        """Lets a held version be ended."""
        self._may_announce.set()

    def withdraw(self) -> None:
        """A version that is still held is not ended."""
        self._is_withdrawn = not self._may_announce.is_set()
        self.release()

    def wait_for_release(self) -> bool:
        self._may_announce.wait()
        return not self._is_withdrawn


class Publisher:
    """Leaving its context waits for the version on its way; after an interruption only for a moment."""

    def __init__(
        self,
        origin: Origin,
        client: CoordinatorClient,
        *,
        checkpoints: Callable[[], Sequence[int]] = tuple,
        on_published: Callable[[Published], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_published` is called by the publisher's thread."""
        self.origin, self._client = origin, client
        self._checkpoints, self._on_published = checkpoints, on_published
        self.epoch = 0
        """Of the run; the coordinator takes no version of another one."""
        self._clock = clock
        self._current: Publishing | None = None

    def has_passed(self, version: int) -> bool:
        """Whether a trainer that repeats steps from an old checkpoint is at a version that the origin no longer serves."""
        head = self.origin.head
        return head is not None and bool(head.versions) and version < head.versions[0].version

    def start(self, version: Version, *, held: bool = False) -> Publishing:
        """Begin to publish, after `wait`. A held version is staged and recorded, but announced only when it is released."""
        assert self._current is None or self._current.ended.done(), "one version is on its way at a time"
        self._current = publishing = Publishing(version, held=held)
        # A daemon: an interrupted trainer does not wait for a coordinator that is away.
        threading.Thread(target=self._publish, args=(publishing,), name="publisher", daemon=True).start()
        return publishing

    def wait(self) -> None:
        """Until nothing is on its way; raises why it failed."""
        if self._current is not None:
            self._current.ended.result()

    def check(self) -> None:
        """Raises why the last version failed, if it did."""
        if self._current is not None and self._current.ended.done():
            self._current.ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._current is not None:
            self._current.withdraw()
            self._settle(self._current, error)

    def _settle(self, publishing: Publishing, error: BaseException) -> None:
        """Let the version on its way end; a failure of its own becomes a note."""
        ended, _ = wait_for([publishing.ended], None if isinstance(error, Exception) else INTERRUPTED_WAIT_S)
        if not ended:
            _fail(publishing.recorded, error)  # its checkpoint must not wait for it either
        elif (failure := publishing.ended.exception()) not in (None, error):
            error.add_note(f"Version {publishing.version.number} was not published: {failure}")

    def _publish(self, publishing: Publishing) -> None:
        try:
            self._stage_record_announce(publishing)
            publishing.ended.set_result(None)
        except BaseException as failure:  # raised where the trainer waits
            _fail(publishing.recorded, failure)
            publishing.ended.set_exception(failure)

    def _stage_record_announce(self, publishing: Publishing) -> None:
        version = publishing.version
        tensors, started = version.snapshot.tensors(), self._clock()
        publication = self._stage(version.number, tensors)
        staged = self._clock()
        times = {"time_stage_s": staged - started, "time_standstill_s": version.standstill_s}
        sizes = {"weights_bytes": publication.weights_bytes}
        ledger_head = self._record(publication, {**version.metrics, **times, **sizes})
        publishing.recorded.set_result(None)
        if not publishing.wait_for_release():
            return
        self.origin.announce(ledger_head=ledger_head)
        announce_s, collected = self._clock() - staged, self.origin.files_collected
        self._on_published(Published(version, publication, staged - started, announce_s, collected))

    def _stage(self, version: int, tensors: Sequence[WireTensor]) -> Publication:
        try:
            return self.origin.stage(version, tensors)
        except IntegrityError as error:
            raise _other_weights(version, error) from error

    def _record(self, publication: Publication, metrics: Mapping[str, Any]) -> str:
        """Returns the head of the ledger."""
        body = api.VersionBody(
            epoch=self.epoch,
            version=publication.version,
            manifest_digest=publication.manifest_digest,
            weights_digest=publication.weights_digest,
            bytes_total=publication.follow_bytes,
            report={name: value for name, value in metrics.items() if isinstance(value, (int, float, str))},
            checkpoints=list(self._checkpoints()),
        )
        try:
            return self._client.publish(body).ledger_head
        except RefusedError as error:
            if error.code != "version_conflict":
                raise
            raise _other_weights(publication.version, error) from error


def _fail(future: "Future[None]", failure: BaseException) -> None:
    """Ends what has not ended yet; another thread may do so at the same time."""
    with suppress(InvalidStateError):
        future.set_exception(failure)
