"""The coordinator's HTTP face: one route per operation, typed JSON in and out, an OpenAPI page at /docs.

Every refusal is `{code, message, hint}`. State changes only in signed requests whose nonce was never used; the nonce is kept
in the same transaction as the change. Uploads are streamed to disk and hashed on the way.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import __version__
from shoal.coordinator import assignments, judging
from shoal.coordinator.context import Context
from shoal.coordinator.owner_routes import owner_routes
from shoal.coordinator.public_routes import public_routes
from shoal.coordinator.service import Service
from shoal.coordinator.store import Store, StoreError
from shoal.coordinator.worker_routes import worker_routes
from shoal.errors import RefusedError, ShoalError, SignatureError
from shoal.protocol import api
from shoal.protocol.signing import TIME_HEADER

SWEEP_INTERVAL_S = 1.0
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": api.Refusal} for status in (400, 401, 403, 404, 409, 413, 422, 503)
}


def create_app(store: Store, context: Context, descriptor_bytes: bytes) -> FastAPI:
    service = Service(store, context)
    app = FastAPI(title="Shoal coordinator", version=__version__, lifespan=_lifespan(service), responses=REFUSALS)
    app.add_middleware(_ServerTime, clock=context.clock)
    app.add_exception_handler(ShoalError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.include_router(public_routes(service, descriptor_bytes))
    app.include_router(worker_routes(service))
    app.include_router(owner_routes(service))
    return app


def _lifespan(service: Service) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep_forever(service))
        yield
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper

    return lifespan


async def _sweep_forever(service: Service) -> None:
    def sweep(connection: sqlite3.Connection) -> bool:
        swept = assignments.sweep(connection, service.context)
        released = judging.release_claims(connection, service.context)
        return judging.advance(connection, service.context) or swept or released

    while True:
        with contextlib.suppress(StoreError):  # reported to every caller; the next sweep tries again
            await service.maintain(sweep)
        await asyncio.sleep(SWEEP_INTERVAL_S)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ShoalError)
    default = 401 if isinstance(error, SignatureError) else 503 if isinstance(error, StoreError) else 400
    status = error.status if isinstance(error, RefusedError) and error.status else default
    return JSONResponse({"code": error.code, "message": error.message, "hint": error.hint}, status_code=status)


async def _refuse_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = f"{where}: {first['msg']}"
    return JSONResponse({"code": "malformed", "message": message, "hint": "See /docs for the API."}, status_code=422)


class _ServerTime:
    """Adds the server's time to every answer, so that clients need no clock of their own."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((TIME_HEADER.encode(), f"{self._clock():.3f}".encode()))
            await send(message)

        await self._app(scope, receive, timed)
