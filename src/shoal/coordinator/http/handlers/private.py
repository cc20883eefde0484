"""What only the owner's browser may ask for: rollout texts, timeline, measurements; and how it becomes the owner's."""

import asyncio

from starlette.responses import JSONResponse, Response

from shoal.coordinator.http.auth import Signed, Visitor
from shoal.coordinator.http.service import Service
from shoal.coordinator.page import rollouts, session, timeline
from shoal.coordinator.store.database import Transaction
from shoal.errors import RefusedError
from shoal.metrics import read_events
from shoal.protocol import page_views


async def show_session(service: Service, body: None, caller: Visitor) -> page_views.SessionView:
    """Whether this browser is the owner's, and which run this is."""
    run = service.run
    return page_views.SessionView(
        is_owner=caller.is_owner,
        run_id=run.descriptor.run_id,
        is_live=run.is_live,
        coordinator_url=run.descriptor.coordinator_url,
        run_key=run.descriptor.run_key,
    )


async def open_session(service: Service, body: page_views.SessionBody, caller: Visitor) -> Response:
    """Exchanges the secret of the owner's link for a cookie that scripts cannot read."""
    if not service.session.knows(body.secret):
        hint = "Print the current link with `shoal run link`."
        raise RefusedError("owner", "The secret of this link is not valid, or was replaced.", hint=hint, status=403)
    cookie = service.session.set_cookie(is_secure=caller.is_secure)
    return JSONResponse({"is_owner": True}, headers={"set-cookie": cookie, "cache-control": "no-store"})


async def rotate_link(service: Service, body: None, caller: Signed) -> page_views.LinkAnswer:
    """Replaces the owner's link: earlier links and cookies are worth nothing."""

    def operation(connection: Transaction) -> str:
        rotation = session.rotate(connection)
        connection.on_commit(service.session.reread)
        return session.link_secret(service.run.secret, service.run.descriptor.run_id, rotation)

    return page_views.LinkAnswer(secret=await service.write(caller, operation))


async def show_step(service: Service, body: page_views.StepAddress, caller: Visitor) -> page_views.OwnerStep:
    """Groups and submissions of a step, with verdicts in full."""
    return await service.read(lambda connection: rollouts.step_view(connection, body.step))


async def show_group(service: Service, body: page_views.GroupAddress, caller: Visitor) -> page_views.OwnerGroupView:
    """The completions of a group: text, tokens, rewards and why."""
    reader = service.rollouts
    if reader is None:
        raise RefusedError("no_rollouts", "This process cannot read rollout files.", status=404)
    with_texts = await service.read(lambda connection: rollouts.group_view(connection, body))
    return await asyncio.to_thread(with_texts, reader)


async def show_timeline(
    service: Service, body: page_views.TimelineAddress, caller: Visitor
) -> page_views.OwnerTimeline:
    """Leases of a window, versions and their arrival, and who was late."""
    path = service.run.metrics.path
    relays = await asyncio.to_thread(read_events, path, names=("relay",)) if path is not None else []
    return await service.read(lambda connection: timeline.timeline(connection, service.run, body, relays))


async def show_worker(service: Service, body: page_views.WorkerAddress, caller: Visitor) -> page_views.OwnerWorker:
    """Measurements, audit rate and verdicts of one key."""
    return await service.read(lambda connection: rollouts.worker_details(connection, service.run, body.key))
