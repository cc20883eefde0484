"""Routes of workers and relays: register, show life, lease, give back, submit."""

import os
import sqlite3
import uuid
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.coordinator import assignments, views
from shoal.coordinator.context import RelayPresence
from shoal.coordinator.service import Service, Signed, stream_to_disk
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER


def worker_routes(service: Service) -> APIRouter:
    router, context = APIRouter(), service.context
    Caller = Annotated[Signed, Depends(service.caller)]

    @router.post("/v1/workers")
    async def register(body: api.RegisterBody, caller: Caller) -> api.WorkerView:
        def operation(connection: sqlite3.Connection) -> api.WorkerView:
            assignments.register(connection, context, caller.key, body)
            return views.worker_view(connection, context, assignments.require_worker(connection, caller.key))

        return await service.write(caller, operation)

    @router.post("/v1/heartbeat")
    async def heartbeat(body: api.HeartbeatBody, caller: Caller) -> api.HeartbeatAnswer:
        # Kept in memory and unsigned by a nonce: a replayed heartbeat can only repeat what its own key said moments ago.
        def look(connection: sqlite3.Connection) -> tuple[sqlite3.Row, str]:
            return assignments.require_worker(connection, caller.key), assignments.run_state(connection, context)

        row, state = await service.read(look)
        if row["state"] == "gone":
            await service.write(caller, lambda connection: assignments.welcome_back(connection, context, caller.key))
        presence = context.seen(caller.key)
        presence.activity = body.activity
        presence.tokens_generated = body.tokens_generated
        presence.bytes_received = body.bytes_received
        return api.HeartbeatAnswer(
            server_time=context.clock(),
            worker=await service.read(lambda connection: views.worker_view(connection, context, row)),
            run_state=state,
            relay_urls=views.live_relay_urls(context),
            interval_s=context.config.coordinator.heartbeat_s,
        )

    @router.post("/v1/leases")
    async def lease(body: api.LeaseBody, caller: Caller) -> api.LeaseAnswer:
        return await service.write(caller, lambda connection: assignments.lease(connection, context, caller.key, body))

    @router.delete("/v1/leases/{lease_id}")
    async def give_back(lease_id: str, caller: Caller) -> Response:
        await service.write(caller, lambda connection: assignments.give_back(connection, context, caller.key, lease_id))
        return Response(status_code=204)

    @router.put("/v1/submissions/{lease_id}")
    async def submit(lease_id: str, request: Request) -> api.SubmissionAnswer:
        limit = context.config.coordinator.max_upload_bytes
        temporary, digest, size_bytes = await stream_to_disk(request, context.submissions, limit)
        try:
            caller = service.authenticate(request, digest)
            signature = request.headers.get(SUBMISSION_SIGNATURE_HEADER, "")
            submission_id = uuid.uuid4().hex
            os.replace(temporary, context.file_of(submission_id))
            temporary = context.file_of(submission_id)
            answer = await service.write(
                caller,
                lambda connection: assignments.accept_upload(
                    connection, context, caller.key, lease_id, submission_id, digest, size_bytes, signature
                ),
            )
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if answer.submission_id != submission_id:
            temporary.unlink(missing_ok=True)
        return answer

    @router.post("/v1/relays")
    async def announce_relay(body: api.RelayBody, caller: Caller) -> api.RelaysAnswer:
        context.relays[caller.key] = RelayPresence(context.clock(), body)
        return relays_answer()

    @router.get("/v1/relays")
    async def relays() -> api.RelaysAnswer:
        return relays_answer()

    def relays_answer() -> api.RelaysAnswer:
        return api.RelaysAnswer(relays=views.relay_views(context), origin_url=context.config.origin_url)

    return router
