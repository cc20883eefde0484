"""What the page asks for: its files, the stream of events, curves, workers, the ledger, and metrics for Prometheus."""

from starlette.responses import Response

from shoal.coordinator import views
from shoal.coordinator.http.auth import Visitor
from shoal.coordinator.http.service import Service
from shoal.coordinator.page import contributor, curves, ledger_page
from shoal.coordinator.page.files import page_response
from shoal.coordinator.page.stream import EventStream, encode
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError
from shoal.metrics.prometheus import CONTENT_TYPE
from shoal.protocol import api, page_views

HEAVY_PARTS = {"workers", "relays", "recent_verdicts"}
"""Of a status: what the page asks for only where it is shown."""


async def index(service: Service, body: None, caller: Visitor) -> Response:
    """The page."""
    return page_response("index.html", caller.known_tag)


async def worker_index(service: Service, body: page_views.WorkerAddress, caller: Visitor) -> Response:
    """The page of one contributor."""
    return page_response("index.html", caller.known_tag)


async def page_file(service: Service, body: page_views.FileAddress, caller: Visitor) -> Response:
    """A script or style of the page."""
    return page_response(body.name, caller.known_tag)


async def events(service: Service, body: None, caller: Visitor) -> Response:
    """Server-sent events: `status` every few seconds while something changes, and what just happened."""
    stream = service.hub.open(caller.address)
    if stream is None:
        raise RefusedError("too_many_streams", "Too many pages are open.", hint="Close some of them.", status=503)
    try:
        status = await service.read(lambda connection: views.status(connection, service.run))
    except BaseException:
        service.hub.close(stream)
        raise
    return EventStream(service.hub, stream, lambda: status_message(status))


def status_message(status: api.StatusView) -> bytes:
    return encode("status", status.model_dump(mode="json", exclude=HEAVY_PARTS))


async def show_curves(service: Service, body: None, caller: None) -> page_views.CurvesView:
    """Metrics of every step, by column, with held-out accuracy and ages."""
    return await service.curves.get(lambda: service.read(curves.curves))


async def show_workers(service: Service, body: None, caller: None) -> page_views.WorkersView:
    """Every worker, those with the most accepted work first."""
    return await service.read(lambda connection: contributor.workers(connection, service.run))


async def show_contributor(
    service: Service, body: page_views.WorkerAddress, caller: None
) -> page_views.ContributorView:
    """Credit, verdicts, trust and leases of one key."""
    return await service.read(lambda connection: contributor.contributor(connection, service.run, body.key))


async def show_ledger(service: Service, body: page_views.LedgerAddress, caller: Visitor) -> page_views.LedgerPage:
    """Entries of the ledger, newest first, and how far this coordinator has checked it again."""

    def read(connection: Connection) -> page_views.LedgerPage:
        extent = views.ledger_extent(connection, service.run, is_owner=caller.is_owner)
        return ledger_page.ledger_page(connection, service.run, service.ledger_check, extent, body)

    return await service.read(read)


async def prometheus(service: Service, body: None, caller: None) -> Response:
    """Metrics in Prometheus text."""
    status = await service.read(lambda connection: views.status(connection, service.run))
    return Response(service.exporter.text(_gauges(service, status)), media_type=CONTENT_TYPE)


def _gauges(service: Service, status: api.StatusView) -> dict[str, object]:
    return status.model_dump(exclude=HEAVY_PARTS) | {
        "event_streams": len(service.hub),
        "relay_bytes_sent": {relay.url: relay.bytes_sent for relay in status.relays},
        "relay_bytes_received": {relay.url: relay.bytes_received for relay in status.relays},
        "relay_success": {relay.url: relay.success for relay in status.relays},
        "relay_version": {relay.url: relay.newest_version for relay in status.relays},
    }
