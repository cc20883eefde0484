"""What anyone may read: descriptor, status, history, relays, ledger."""

from collections.abc import AsyncIterator
from functools import partial

from starlette.responses import Response, StreamingResponse

from shoal.coordinator import ledger, views
from shoal.coordinator.batching import rewinds
from shoal.coordinator.http.auth import Visitor
from shoal.coordinator.http.service import Service
from shoal.protocol import api

PAGE_ENTRIES = 512


async def descriptor(service: Service, body: None, caller: None) -> Response:
    """The run's descriptor, signed with the run key."""
    return Response(service.descriptor_bytes, media_type="application/json")


async def status(service: Service, body: None, caller: None) -> api.StatusView:
    """Where the run stands now."""
    return await service.read(lambda connection: views.status(connection, service.run))


async def history(service: Service, body: None, caller: None) -> api.HistoryView:
    """Versions, evaluations, batches and bans since the run began."""
    return await service.read(lambda connection: views.history(connection, service.run))


async def line(service: Service, body: None, caller: None) -> api.LineAnswer:
    """Which versions count: the epoch, and what every rewind returned to."""
    return await service.read(lambda connection: rewinds.line(connection, service.heads))


async def relays(service: Service, body: None, caller: None) -> api.RelaysAnswer:
    """The relays that announced themselves lately."""
    return views.relays(service.run)


async def export_ledger(service: Service, body: None, caller: Visitor) -> Response:
    """The ledger, one entry per line, with a signed seal at the end. Entries of open steps are the owner's alone."""
    return StreamingResponse(_export(service, is_owner=caller.is_owner), media_type="application/jsonl")


async def _export(service: Service, *, is_owner: bool) -> AsyncIterator[bytes]:
    """Page by page, so that a long ledger neither fills the memory nor blocks other readers."""
    run = service.run
    extent = await service.read(lambda connection: views.ledger_extent(connection, run, is_owner=is_owner))
    for start in range(0, extent.entries, PAGE_ENTRIES):
        stop = min(start + PAGE_ENTRIES, extent.entries)
        yield b"".join(await service.read(partial(ledger.page, start=start, stop=stop)))
    yield ledger.seal(run.keypair, run.descriptor.run_id, extent, run.clock())
