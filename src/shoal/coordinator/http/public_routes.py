"""Routes that anyone may read: descriptor, status, history, ledger."""

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from shoal.coordinator import ledger, views
from shoal.coordinator.http.service import Service
from shoal.protocol import api

PAGE_ENTRIES = 512


def public_routes(service: Service, descriptor_bytes: bytes) -> APIRouter:
    router, context = APIRouter(), service.context

    @router.get("/v1/descriptor")
    async def descriptor() -> Response:
        return Response(descriptor_bytes, media_type="application/json")

    @router.get("/v1/status")
    async def status() -> api.StatusView:
        return await service.read(lambda connection: views.status(connection, context))

    @router.get("/v1/history")
    async def history() -> api.HistoryView:
        return await service.read(lambda connection: views.history(connection, context))

    @router.get("/v1/ledger", response_class=StreamingResponse, responses={200: {"content": {"application/jsonl": {}}}})
    async def export_ledger() -> StreamingResponse:
        return StreamingResponse(_export(service), media_type="application/jsonl")

    return router


async def _export(service: Service) -> AsyncIterator[bytes]:
    """Page by page, so that a long ledger neither fills the memory nor holds up other readers."""
    context = service.context
    count, head = await service.read(ledger.head)
    for start in range(0, count, PAGE_ENTRIES):
        stop = min(start + PAGE_ENTRIES, count)
        yield b"".join(await service.read(partial(ledger.page, start=start, stop=stop)))
    yield ledger.seal(context.keypair, context.descriptor.run_id, count, head)
