"""The coordinator's HTTP face: one route per operation, typed JSON in and out, an OpenAPI page at /docs.

Every refusal is `{code, message, hint}`. State changes only in signed requests whose nonce was never used; the nonce is kept
in the same transaction as the change. Uploads are streamed to disk and hashed on the way.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shoal import __version__
from shoal.coordinator import housekeeping, retention
from shoal.coordinator.bucket import Bucket
from shoal.coordinator.context import Context
from shoal.coordinator.http.dispatch import Express
from shoal.coordinator.http.middleware import AddressLimit, BodyLimit, ServerTime
from shoal.coordinator.http.openapi import publish_schema
from shoal.coordinator.http.owner_routes import control_routes
from shoal.coordinator.http.public_routes import public_routes
from shoal.coordinator.http.refusals import refusal_of, refuse, too_many
from shoal.coordinator.http.role_routes import owner_routes
from shoal.coordinator.http.service import Service
from shoal.coordinator.http.worker_routes import worker_routes
from shoal.coordinator.store.writer import Store
from shoal.errors import ShoalError
from shoal.protocol import api

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
SWEEPS_PER_COLLECTION = 10
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": api.Refusal} for status in (400, 401, 403, 404, 405, 409, 413, 422, 426, 429, 503)
}


def create_app(store: Store, context: Context, descriptor_bytes: bytes) -> FastAPI:
    service = Service(store, context)
    app = FastAPI(title="Shoal coordinator", version=__version__, lifespan=_lifespan(service), responses=REFUSALS)
    routers = [
        public_routes(service, descriptor_bytes),
        worker_routes(service),
        owner_routes(service),
        control_routes(service),
    ]
    app.add_middleware(Express, service=service, routers=routers)
    app.add_middleware(BodyLimit)
    app.add_middleware(AddressLimit, limit=service.address_limit, refuse=_refuse_address)
    app.add_middleware(ServerTime, clock=context.clock)
    for refused in (ShoalError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(refused, refuse)
    for router in routers:
        app.include_router(router)
    publish_schema(app, service, routers)
    app.state.service = service
    return app


def _lifespan(service: Service) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.listen()
        sweeper = asyncio.create_task(_sweep_forever(service))
        yield
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        service.close()

    return lifespan


async def _sweep_forever(service: Service) -> None:
    for number in itertools.count():
        try:
            await service.maintain(lambda connection: housekeeping.maintain(connection, service.context))
            if number % SWEEPS_PER_COLLECTION == 0:
                await collect_rollouts(service)
        except Exception:  # the swarm depends on the next sweep, whatever happened to this one
            log.exception("a sweep failed")
        await asyncio.sleep(SWEEP_INTERVAL_S)


async def collect_rollouts(service: Service) -> int:
    """Removes the rollout files that nothing needs any more; says how many, and when the disk has become too full."""
    context = service.context
    if context.bucket is not None:
        collected = await _empty_bucket(service, context.bucket)
    else:
        collected = await service.again(lambda connection: retention.collect(connection, context))
        for submission_id in collected:
            context.file_of(submission_id).unlink(missing_ok=True)
    if collected:
        context.metrics.event("rollouts_collected", files=len(collected))
    if not context.has_space():
        free = context.free_bytes(context.submissions)
        context.metrics.event("disk_full", free_bytes=free, min_free_bytes=context.config.coordinator.min_free_bytes)
        log.warning("the disk is full (%d bytes free): no work is given out or taken in until there is room", free)
    return len(collected)


async def _empty_bucket(service: Service, bucket: Bucket) -> list[str]:
    """Removes what is due from the bucket, and then from the record; a bucket that is away keeps both for the next sweep."""
    context = service.context
    found = await service.read(lambda connection: retention.due(connection, context))
    for submission_id in found:
        await bucket.delete(submission_id)
    await service.again(lambda connection: retention.forget(connection, context, found))
    return found


def _refuse_address(wait_s: float) -> Response:
    return refusal_of(too_many("Your address asks too often.", wait_s))
