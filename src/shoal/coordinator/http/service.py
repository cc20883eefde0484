"""How a handler reaches the store: one write with its nonce, reads, uploads on disk, and waiting for changes.

It also keeps what one address may hold: requests per second and under way, connections, new keys. Keys with accepted work have
budgets of their own, so that no stranger, not even behind the same address, can use theirs up.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal.coordinator.batching import steps
from shoal.coordinator.http.auth import Gate, Signed
from shoal.coordinator.http.open_uploads import OpenUploads
from shoal.coordinator.http.refusals import too_many
from shoal.coordinator.ledger.heads import Heads
from shoal.coordinator.page.ledger_page import LedgerCheck
from shoal.coordinator.page.recent import Recent
from shoal.coordinator.page.rollouts import RolloutReader
from shoal.coordinator.page.session import OwnerSession
from shoal.coordinator.page.stream import EventHub
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.loop_results import LoopFuture, LoopResults
from shoal.coordinator.store.remembered import Remembered, RememberedWorkers
from shoal.coordinator.store.writer import Store
from shoal.coordinator.work import leasing
from shoal.metrics import Exporter
from shoal.net import Connections, Proxies, RateLimit, UnderWay
from shoal.protocol.page_views import CurvesView

Result = TypeVar("Result")

UPLOADS_SYNCED_AT_ONCE = 32
"""Syncs that run at the same time share commits of the file system's journal."""
CONNECTION = "shoal.connection"
"""Extension of an ASGI scope: the connection that the request came by."""
CONNECTIONS_PER_ADDRESS = 256
"""Of strangers: a data centre behind one address, not a flood. It bounds their memory, too: a head has at most 16 KiB."""
CONNECTIONS_PER_KEY = 16
CONNECTIONS = 8192
REQUESTS_PER_ADDRESS = 256
"""Under way. Behind a proxy many addresses share its connections."""
NEW_KEYS_AT_ONCE, NEW_KEYS_PER_S = 64, 1.0
"""That one address may register. Keys are free, and each makes a row that is kept for a day at least."""


class ClientConnection(Protocol):
    @property
    def has_sent_all(self) -> bool: ...

    def drop(self) -> None: ...

    def hold(self) -> None: ...

    def vouch(self, key: str) -> None: ...


class ChangeSignal:
    """Wakes everybody who waits for a change. A version read before looking makes sure that no change in between is missed."""

    def __init__(self) -> None:
        self.version = 0
        self.waiting = 0
        """How many wait now."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_changed(self, version: int, timeout_s: float) -> None:
        """Returns after the first change since `version`, or after the timeout."""
        if self.version == version:
            self.waiting += 1
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                pass
            finally:
                self.waiting -= 1


@dataclass(eq=False)
class HeldRequest:
    """A request that waits for work."""

    key: str
    has_delivered: bool = False
    """A file, since it waits: the key may have room for another lease."""


class Service:
    """Store, run and change signal, and the way operations run on them."""

    def __init__(
        self,
        store: Store,
        run: Run,
        descriptor_bytes: bytes,
        open_files: int = 1024,
        rollouts: RolloutReader | None = None,
    ) -> None:
        self.store, self.run, self.descriptor_bytes, self.rollouts = store, run, descriptor_bytes, rollouts
        self.session = OwnerSession(store, run.secret, run.descriptor.run_id)
        self.gate, self.changes, self.uploads = Gate(run, self.session), ChangeSignal(), OpenUploads(run)
        self.heads = Heads(run)
        self.newest_head = Remembered(store, self.heads.newest)
        self.epoch = Remembered(store, steps.epoch)
        self.demand = Remembered(store, lambda connection: leasing.demand(connection, run))
        self._held: list[HeldRequest] = []
        self.workers = RememberedWorkers(store)
        self.hub, self.exporter = EventHub(), Exporter(run.metrics, "coordinator")
        self.curves: Recent[CurvesView] = Recent()
        self.ledger_check = LedgerCheck(run.descriptor.coordinator_key)
        run.metrics.listen(self.hub.hear)
        per_s = run.config.coordinator.requests_per_s_address
        self.address_limit = RateLimit(per_s, run.clock)
        self.forgery_limit = RateLimit(per_s, run.clock)
        self.new_keys = RateLimit(NEW_KEYS_PER_S if per_s else 0.0, run.clock, burst=NEW_KEYS_AT_ONCE)
        self.under_way = UnderWay(REQUESTS_PER_ADDRESS if per_s else None)
        self.proxies = Proxies(run.config.coordinator.trusted_proxies)
        self.connections: Connections[ClientConnection] = Connections(
            CONNECTIONS_PER_ADDRESS if per_s else None, min(CONNECTIONS, open_files // 2), CONNECTIONS_PER_KEY
        )
        self.stopping = False
        self._results = LoopResults()
        self._syncers = ThreadPoolExecutor(UPLOADS_SYNCED_AT_ONCE, "upload-sync")

    def close(self) -> None:
        self._syncers.shutdown(wait=False)

    def listen(self) -> None:
        """Notifies waiters whenever a change is on disk, whichever process made it. Belongs to the running loop."""
        loop = asyncio.get_running_loop()
        self.hub.start()

        def on_change() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                loop.call_soon_threadsafe(self.changes.notify)

        self.store.on_change(on_change)

    @property
    def leases_held(self) -> int:
        """Requests that wait for work."""
        return len(self._held)

    @contextlib.contextmanager
    def holding(self, key: str) -> Iterator[HeldRequest]:
        """While a request of this key waits for work."""
        held = HeldRequest(key)
        self._held.append(held)
        try:
            yield held
        finally:
            self._held.remove(held)

    def note_delivery(self, key: str) -> None:
        """Called by the thread that writes."""
        for held in tuple(self._held):
            held.has_delivered |= held.key == key

    def stop_waiting(self) -> None:
        """Answers every long poll with what there is, so that a stop takes no longer than a request."""
        self.stopping = True
        self.hub.close_all()
        self.changes.notify()

    def count_new_key(self, address: str) -> None:
        if wait_s := self.new_keys.wait_s(address):
            raise too_many("Your address registers too many keys.", wait_s)

    async def write(
        self, signed: Signed, operation: Callable[[Transaction], Result], *, notifies: bool = False
    ) -> Result:
        """Runs a state change once; notifies if a validator or the trainer may be waiting for it."""

        def work(connection: Transaction) -> Result:
            signed.spend(connection)
            return operation(connection)

        return await self.write_unsigned(work, (lambda _: True) if notifies else None)

    async def write_unsigned(
        self, operation: Callable[[Transaction], Result], announces: Callable[[Result], bool] | None = None
    ) -> Result:
        """A change that spends no nonce: the server's own, or of a request whose nonce is already spent."""
        pending: LoopFuture[Result] = self._results.expect()  # type: ignore[assignment]  # whatever the operation returns
        self.store.enqueue(operation, pending, announces)
        return await pending.future

    async def read(self, operation: Callable[[Connection], Result]) -> Result:
        """One committed state of the store, for as long as it takes."""
        return await asyncio.to_thread(self.store.read, operation)

    async def read_rows(self, operation: Callable[[Connection], Result]) -> Result:
        """A few rows found by an index. In a local file that takes less time than handing it to a thread."""
        if self.store.database.is_shared:
            return await asyncio.to_thread(self.store.read_rows, operation)
        return self.store.read_rows(operation)

    async def sync(self, file: int) -> None:
        """Waits until a file is on disk; readers of the store do not queue behind it."""
        await asyncio.get_running_loop().run_in_executor(self._syncers, os.fsync, file)
