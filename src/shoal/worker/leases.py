"""Takes leases in the background, so that the engine never waits for the coordinator's answer.

The loop says how many it wants; a slot that is ready to begin (weights on disk, samples known), the reason why there is none, or an
error arrives in its inbox. A slot that cannot be prepared is given back, and the next one may be better; only a row of such
failures ends the worker.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from shoal.errors import RefusedError, ShoalError, UnavailableError
from shoal.metrics import Report
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.worker.slots import Slot
from shoal.worker.weights import WeightFollower

VERSIONS_NAMED = 16
"""Of those held, the newest; the coordinator reads no more."""
FAILURES_IN_A_ROW = 4
NEXT_STEP_S = 0.25
"""How long a request for work may wait for the next step to begin."""
SMALL_SWARM_S = 1.0
"""Where idle workers ask again that soon, they also ask as soon as a new version is here; in larger ones all would at once."""
STOP_DEADLINE_S = 5.0


@dataclass(frozen=True)
class NoWork:
    """Why the coordinator has no lease."""

    reason: str
    wanted_version: int


@dataclass(frozen=True)
class Taken:
    slot: Slot
    seconds: float
    """From the request to the slot, ready to begin."""


News = Taken | NoWork | Exception


class LeaseTaker:
    def __init__(
        self,
        client: CoordinatorClient,
        weights: WeightFollower,
        *,
        prepare: Callable[[api.Lease], Slot],
        register: Callable[[], object],
        inbox: "SimpleQueue[News]",
        report: Report,
    ) -> None:
        self._client, self._weights, self._report = client, weights, report
        self._prepare, self._register, self._inbox = prepare, register, inbox
        self._held: Sequence[int] = ()
        self._count = 0
        self._failures = 0
        self._gives_back = True
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._take_forever, name="leases", daemon=True)

    @property
    def is_asking(self) -> bool:
        """Whether an answer is on its way."""
        return self._wanted.is_set()

    def start(self) -> None:
        self._thread.start()

    def ask(self, count: int, held_versions: Sequence[int]) -> None:
        """Asks for that number of leases, each with one of these versions, until the coordinator has no more."""
        self._count, self._held = count, held_versions
        self._wanted.set()

    def stop(self, *, is_refused: bool) -> None:
        """No further requests; a lease that is on its way is given back, unless the coordinator refuses this key anyway."""
        self._gives_back = not is_refused
        self._stopping.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(STOP_DEADLINE_S)

    def give_back(self, lease: api.Lease) -> bool:
        """Whether the coordinator could be asked; if not, the lease will expire."""
        try:
            self._client.give_back(lease.lease_id)
        except ShoalError as error:
            self._report(f"could not give step {lease.step} slot {lease.slot} back, it will expire: {error}")
            return not isinstance(error, UnavailableError)
        self._report(f"gave step {lease.step} slot {lease.slot} back")
        return True

    def _take_forever(self) -> None:
        while self._wanted.wait() and not self._stopping.is_set():
            try:
                self._take()
            except Exception as error:  # the loop raises it
                self._tell(error)

    def _take(self) -> None:
        """One request; the answer may have several slots."""
        started, newest = time.monotonic(), self._weights.newest()
        answer = self._ask()
        if answer.lease is None:
            self._tell(self._wait(answer, newest))
        for lease in answer.granted:
            news = self._prepared(lease, started) if not self._stopping.is_set() else None
            if news is not None and not (self._stopping.is_set() and isinstance(news, Taken)):
                self._tell(news)
            elif self._gives_back:
                self.give_back(lease)

    def _prepared(self, lease: api.Lease, started: float) -> News:
        try:
            slot = self._prepare(lease)
        except ShoalError as error:
            return self._unprepared(lease, error)
        self._failures = 0
        return Taken(slot, time.monotonic() - started)

    def _tell(self, news: News) -> None:
        """The loop hears of it, and may ask again once it has all that it asked for, or there is no more."""
        self._count = self._count - 1 if isinstance(news, Taken) else 0
        self._inbox.put(news)
        if self._count <= 0:
            self._wanted.clear()

    def _ask(self) -> api.LeaseAnswer:
        body = api.LeaseBody(
            request_id=secrets.token_hex(16),
            held_versions=list(self._held)[-VERSIONS_NAMED:],
            most=min(max(1, self._count), api.MOST_LEASES),
            wait_s=NEXT_STEP_S,
        )
        try:
            return self._client.lease(body)
        except RefusedError as refusal:
            if refusal.code != "unknown_worker":
                raise
            self._report("the coordinator does not know this worker any more, registering again")
            self._register()
            return self._ask()

    def _wait(self, answer: api.LeaseAnswer, newest: int) -> NoWork:
        """Passes the time until the coordinator may be asked again; the loop hears the reason at once.

        `newest` was the newest version when it was asked."""
        news = NoWork(answer.reason, answer.wanted_version)
        if answer.reason == "finished":
            return news
        self._inbox.put(news)
        if answer.reason == "need_weights" or answer.retry_after_s <= SMALL_SWARM_S:
            self._weights.wait_newer(newest, answer.retry_after_s)
        else:
            self._stopping.wait(answer.retry_after_s)
        return NoWork("", answer.wanted_version)

    def _unprepared(self, lease: api.Lease, error: ShoalError) -> News:
        """A version that no relay has any more, or tasks that this machine refuses: not the end of the worker."""
        self._failures += 1
        if self._stopping.is_set() or self._failures >= FAILURES_IN_A_ROW:
            self.give_back(lease)
            return error
        self._report(f"step {lease.step} slot {lease.slot} cannot be worked on: {error}")
        self.give_back(lease)
        return NoWork("", lease.policy_version)
