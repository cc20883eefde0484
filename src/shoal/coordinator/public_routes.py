"""Routes that anyone may read: descriptor, status, history, ledger."""

from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from shoal.coordinator import ledger, views
from shoal.coordinator.service import Service
from shoal.protocol import api


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

    @router.get("/v1/ledger")
    async def export_ledger() -> StreamingResponse:
        lines = await service.read(
            lambda connection: list(ledger.export(connection, context.keypair, context.descriptor.run_id))
        )
        return StreamingResponse(_chunks(lines), media_type="application/jsonl")

    return router


def _chunks(lines: list[bytes]) -> Iterator[bytes]:
    for start in range(0, len(lines), 256):
        yield b"".join(lines[start : start + 256])
