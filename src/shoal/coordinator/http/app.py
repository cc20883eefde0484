"""The coordinator as an ASGI application: the table of routes, and the sweeps that time alone makes necessary.

Every refusal is `{code, message, hint}`. State changes only in signed requests whose nonce was never used; the nonce is stored
in the same transaction as the change. Uploads are streamed to disk and hashed on the way.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.coordinator import housekeeping, views
from shoal.coordinator.alerting import AlertWatch
from shoal.coordinator.batching import retention
from shoal.coordinator.http.dispatch import Dispatcher
from shoal.coordinator.http.handlers.page import status_message
from shoal.coordinator.http.openapi import documentation
from shoal.coordinator.http.service import Service
from shoal.coordinator.http.table import ROUTES
from shoal.coordinator.page.rollouts import RolloutReader
from shoal.coordinator.run import Run
from shoal.coordinator.store.bucket import S3Bucket
from shoal.coordinator.store.writer import Store

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
SWEEPS_PER_COLLECTION = 10
SWEEPS_PER_FORGETTING = 600
WATCH_INTERVAL_S = 2.0
STILL_INTERVAL_S = 10.0
"""Between two looks at a run in which nothing changes."""


class CoordinatorApp:
    """HTTP goes to the dispatcher; the sweeper runs as long as the server does."""

    def __init__(self, service: Service, sweep_interval_s: float) -> None:
        self.service, self._sweep_interval_s = service, sweep_interval_s
        self._dispatcher: ASGIApp = Dispatcher(service, [*ROUTES, *documentation(ROUTES)])
        self._lifespan = Router(lifespan=self._run).lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._dispatcher(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    @contextlib.asynccontextmanager
    async def _run(self, _: object) -> AsyncIterator[None]:
        self.service.listen()
        tasks = [asyncio.create_task(work) for work in self._work()]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.service.close()

    def _work(self) -> list[Coroutine[None, None, None]]:
        return [_sweep_forever(self.service, self._sweep_interval_s), _watch_forever(self.service)]


class ViewApp(CoordinatorApp):
    """The page on the files of a run that nobody serves: what is read without a signature, and nothing that changes anything."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, SWEEP_INTERVAL_S)
        self._dispatcher = Dispatcher(service, [route for route in ROUTES if not route.access.is_signed])

    def _work(self) -> list[Coroutine[None, None, None]]:
        return []


def create_app(
    store: Store,
    run: Run,
    descriptor_bytes: bytes,
    *,
    sweep_interval_s: float = SWEEP_INTERVAL_S,
    open_files: int = 1024,
    rollouts: RolloutReader | None = None,
) -> CoordinatorApp:
    """`open_files` is how many the process may have; half of them are for connections."""
    return CoordinatorApp(Service(store, run, descriptor_bytes, open_files, rollouts), sweep_interval_s)


async def _sweep_forever(service: Service, interval_s: float) -> None:
    for number in itertools.count():
        try:
            await service.write_unsigned(lambda connection: housekeeping.maintain(connection, service.run), bool)
            if number % SWEEPS_PER_COLLECTION == 0:
                await collect_rollouts(service)
            if number % SWEEPS_PER_FORGETTING == 0:
                await service.write_unsigned(lambda connection: housekeeping.forget_strangers(connection, service.run))
        except Exception:  # the swarm depends on the next sweep, whatever happened to this one
            log.exception("a sweep failed")
        await asyncio.sleep(interval_s)


async def _watch_forever(service: Service) -> None:
    """Alerts become events, and open pages get the status, whenever something has changed."""
    alerts = AlertWatch(service.run.metrics)
    while True:
        seen = service.changes.version
        try:
            status = await service.read(lambda connection: views.status(connection, service.run))
            alerts.note(status.alerts)
            if len(service.hub):
                service.hub.send(status_message(status))
        except Exception:  # nobody may depend on who looks on
            log.exception("the status could not be read")
        await asyncio.sleep(WATCH_INTERVAL_S)
        await service.changes.wait_changed(seen, STILL_INTERVAL_S)


async def collect_rollouts(service: Service) -> int:
    """Removes the rollout files that nothing needs any more; says how many, and when the disk has become too full."""
    run = service.run
    if run.bucket is not None:
        collected = await _empty_bucket(service, run.bucket)
    else:
        crowding = await service.read(lambda connection: retention.crowding(connection, run))
        collected = await service.write_unsigned(lambda connection: retention.collect(connection, run, crowding))
        for submission_id in collected:
            run.file_of(submission_id).unlink(missing_ok=True)
        service.uploads.found_kept(await service.read(retention.strangers_bytes))
    for submission_id in collected:
        run.trace_of(submission_id).unlink(missing_ok=True)
    if collected:
        run.metrics.event("rollouts_collected", files=len(collected))
    if not run.has_space():
        free = run.free_bytes(run.submissions)
        run.metrics.event("disk_full", free_bytes=free, min_free_bytes=run.min_free_bytes)
        log.warning("the disk is full (%d bytes free): no work is given out or taken in until there is room", free)
    return len(collected)


async def _empty_bucket(service: Service, bucket: S3Bucket) -> list[str]:
    """Removes what is due from the bucket, and then from the record; a bucket that is away keeps both for the next sweep."""
    run = service.run
    found = await service.read(lambda connection: retention.due(connection, run))
    for submission_id in found:
        await bucket.delete(submission_id)
    await service.write_unsigned(lambda connection: retention.forget(connection, run, found))
    return found
