"""Routes of workers and relays: register, show life, lease, give back, submit."""

import uuid
from typing import Annotated

from blake3 import blake3
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from shoal.coordinator import leasing, steps, submissions, views, workers
from shoal.coordinator.context import Context
from shoal.coordinator.http.openapi import UPLOAD_BODY
from shoal.coordinator.http.service import Service, Signed, bounded_stream, stream_to_disk
from shoal.coordinator.store.database import Connection, Row
from shoal.errors import RefusedError, ShoalError
from shoal.protocol import api
from shoal.protocol.client import SUBMISSION_SIGNATURE_HEADER
from shoal.protocol.signing import BODY_HEADER


def bucket_name(context: Context, lease_id: str, digest: str) -> str:
    """The same name whenever the same file is announced, and one that nobody else can guess."""
    return blake3(f"upload\n{lease_id}\n{digest}".encode(), key=context.secret).hexdigest()[:32]


def worker_routes(service: Service) -> APIRouter:
    router, context = APIRouter(), service.context
    Caller = Annotated[Signed, Depends(service.caller)]

    @router.post("/v1/workers")
    async def register(body: api.RegisterBody, caller: Caller) -> api.WorkerView:
        def operation(connection: Connection) -> api.WorkerView:
            workers.register(connection, context, caller.key, body)
            return views.worker_view(connection, context, workers.require_worker(connection, caller.key))

        return await service.write(caller, operation)

    @router.post("/v1/heartbeat")
    async def heartbeat(body: api.HeartbeatBody, caller: Caller) -> api.HeartbeatAnswer:
        # Costs no nonce and no durable write; one that is shown again changes nothing.
        service.check_clock(caller.at, context.config.coordinator.gone_after_s)

        def look(connection: Connection) -> tuple[api.WorkerView, str]:
            row = workers.require_worker(connection, caller.key)
            context.hear(caller.key, body, caller.stamp)
            return views.worker_view(connection, context, row), steps.run_state(connection, context)

        view, state = await service.glance(look)
        if view.state == "gone":
            await service.write(caller, lambda connection: workers.mark_seen(connection, context, caller.key))
            view, state = await service.glance(look)
        return api.HeartbeatAnswer(
            server_time=context.clock(),
            worker=view,
            run_state=state,
            relay_urls=views.live_relay_urls(context),
            interval_s=context.config.coordinator.heartbeat_s,
        )

    @router.post("/v1/leases")
    async def lease(body: api.LeaseBody, caller: Caller) -> api.LeaseAnswer:
        return await service.write(caller, lambda connection: leasing.lease(connection, context, caller.key, body))

    @router.delete("/v1/leases/{lease_id}", status_code=204)
    async def give_back(lease_id: str, caller: Caller) -> Response:
        await service.write(caller, lambda connection: leasing.give_back(connection, context, caller.key, lease_id))
        return Response(status_code=204)

    async def expect_upload(caller: Signed, lease_id: str, digest: str, signature: str) -> Row | None:
        """The lease that this file answers, none if it was taken before; anything else is refused."""
        lease = await service.glance(
            lambda connection: submissions.check_upload(connection, context, caller.key, lease_id, digest)
        )
        if lease is not None:
            submissions.verify_upload(context, caller.key, lease_id, digest, signature)
        return lease

    @router.put("/v1/submissions/{lease_id}", openapi_extra=UPLOAD_BODY)
    async def submit(lease_id: str, request: Request) -> api.SubmissionAnswer:
        limit = context.config.coordinator.max_upload_bytes
        claimed = request.headers.get(BODY_HEADER, "")
        signature = request.headers.get(SUBMISSION_SIGNATURE_HEADER, "")
        try:
            caller = service.authenticate(request, claimed)
            context.require_space()
            await expect_upload(caller, lease_id, claimed, signature)
        except ShoalError:
            # Closing on a sender makes it see a broken pipe instead of the refusal.
            async for _ in bounded_stream(request, limit):
                pass
            raise
        submission_id = uuid.uuid4().hex
        path = context.file_of(submission_id)
        digest, size_bytes = await stream_to_disk(service, request, path, limit)

        def operation(connection: Connection) -> api.SubmissionAnswer:
            if digest != claimed:
                raise RefusedError("digest", "The uploaded bytes are not those that were signed.", status=400)
            return submissions.accept_upload(
                connection, context, caller.key, lease_id, submission_id, digest, size_bytes, signature
            )

        try:
            answer = await service.write(caller, operation, rings=True)
        except Exception:  # a cancelled request may still be kept by the store: then the file must stay
            path.unlink(missing_ok=True)
            raise
        if answer.submission_id != submission_id:
            path.unlink(missing_ok=True)
        return answer

    @router.post("/v1/uploads/{lease_id}")
    async def upload_url(lease_id: str, body: api.UploadBody, caller: Caller) -> api.UploadAnswer:
        limit = context.config.coordinator.max_upload_bytes
        if body.size_bytes > limit:
            raise RefusedError("too_large", f"The upload is larger than {limit} bytes.", status=413)
        await expect_upload(caller, lease_id, body.digest, body.signature)
        if context.bucket is None:
            return api.UploadAnswer(url="")
        name = bucket_name(context, lease_id, body.digest)
        lasts_s = context.config.coordinator.lease_s
        return api.UploadAnswer(url=context.bucket.upload_url(name, body.size_bytes, lasts_s), expires_s=lasts_s)

    @router.post("/v1/uploads/{lease_id}/done")
    async def uploaded(lease_id: str, body: api.UploadBody, caller: Caller) -> api.SubmissionAnswer:
        if context.bucket is None:
            raise RefusedError("no_bucket", "This run takes rollouts itself.", hint="Use PUT.", status=409)
        lease = await expect_upload(caller, lease_id, body.digest, body.signature)
        name = bucket_name(context, lease_id, body.digest)
        digest = body.digest if lease is None else await context.bucket.take_in(name, body.size_bytes)
        if digest != body.digest:
            await context.bucket.delete(name)
            raise RefusedError("digest", "The uploaded bytes are not those that were signed.", status=400)
        answer = await service.write(
            caller,
            lambda connection: submissions.accept_upload(
                connection, context, caller.key, lease_id, name, digest, body.size_bytes, body.signature
            ),
            rings=True,
        )
        await context.bucket.forget_upload(name)
        return answer

    @router.post("/v1/relays")
    async def announce_relay(body: api.RelayBody, caller: Caller) -> api.RelaysAnswer:
        context.note_relay(caller.key, body, caller.stamp)
        return relays_answer()

    @router.get("/v1/relays")
    async def relays() -> api.RelaysAnswer:
        return relays_answer()

    def relays_answer() -> api.RelaysAnswer:
        return api.RelaysAnswer(relays=views.relay_views(context), origin_url=context.config.origin_url)

    return router
