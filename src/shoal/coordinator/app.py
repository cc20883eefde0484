"""The coordinator's HTTP face: one route per operation, typed JSON in and out, an OpenAPI page at /docs.

Every refusal is `{code, message, hint}`. State changes only in signed requests whose nonce was never used; the nonce is kept
in the same transaction as the change. Uploads are streamed to disk and hashed on the way.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shoal import __version__
from shoal.coordinator import judging, retention
from shoal.coordinator.context import Context
from shoal.coordinator.control_routes import control_routes
from shoal.coordinator.middleware import AddressLimit, BodyLimit, ServerTime
from shoal.coordinator.owner_routes import owner_routes
from shoal.coordinator.public_routes import public_routes
from shoal.coordinator.service import Service, too_many
from shoal.coordinator.store import Store, StoreError
from shoal.coordinator.worker_routes import worker_routes
from shoal.errors import RefusedError, ShoalError, SignatureError
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
    app.add_middleware(BodyLimit)
    app.add_middleware(AddressLimit, limit=service.address_limit, refuse=_refuse_address)
    app.add_middleware(ServerTime, clock=context.clock)
    app.add_exception_handler(ShoalError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_request)
    app.add_exception_handler(Exception, _fail)
    app.include_router(public_routes(service, descriptor_bytes))
    app.include_router(worker_routes(service))
    app.include_router(owner_routes(service))
    app.include_router(control_routes(service))
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

    return lifespan


async def _sweep_forever(service: Service) -> None:
    for number in itertools.count():
        try:
            await service.maintain(lambda connection: judging.maintain(connection, service.context))
            if number % SWEEPS_PER_COLLECTION == 0:
                await collect_rollouts(service)
        except Exception:  # the swarm depends on the next sweep, whatever happened to this one
            log.exception("a sweep failed")
        await asyncio.sleep(SWEEP_INTERVAL_S)


async def collect_rollouts(service: Service) -> int:
    """Removes the rollout files that nothing needs any more; says how many, and when the disk has become too full."""
    context = service.context
    collected = await service.again(lambda connection: retention.collect(connection, context))
    for submission_id in collected:
        if context.bucket is not None:
            await context.bucket.delete(submission_id)
        else:
            context.file_of(submission_id).unlink(missing_ok=True)
    if collected:
        context.metrics.event("rollouts_collected", files=len(collected))
    if not context.has_space():
        free = context.free_bytes(context.submissions)
        context.metrics.event("disk_full", free_bytes=free, min_free_bytes=context.config.coordinator.min_free_bytes)
        log.warning("the disk is full (%d bytes free): no work is given out or taken in until there is room", free)
    return len(collected)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ShoalError)
    default = 401 if isinstance(error, SignatureError) else 503 if isinstance(error, StoreError) else 400
    status = error.status if isinstance(error, RefusedError) and error.status else default
    wait_s = error.retry_after_s if isinstance(error, RefusedError) else None
    return _refusal(status, error.code, error.message, error.hint, wait_s)


def _refuse_address(wait_s: float) -> JSONResponse:
    error = too_many("Your address asks too often.", wait_s)
    return _refusal(error.status, error.code, error.message, error.hint, wait_s)


async def _refuse_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _refusal(422, "malformed", f"{where[:200]}: {first['msg']}", "See /docs for the API.")


async def _refuse_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method", 413: "too_large"}.get(error.status_code, "malformed")
    return _refusal(error.status_code, code, str(error.detail), "See /docs for the API.")


async def _fail(_: Request, error: Exception) -> JSONResponse:
    return _refusal(500, "internal", f"The coordinator failed: {type(error).__name__}.", "Its log has the details.")


def _refusal(status: int, code: str, message: str, hint: str, wait_s: float | None = None) -> JSONResponse:
    headers = {} if wait_s is None else {"retry-after": str(math.ceil(wait_s))}
    printable = message.encode(errors="replace").decode()  # field names of a caller may be no unicode
    return JSONResponse({"code": code, "message": printable, "hint": hint}, status_code=status, headers=headers)
