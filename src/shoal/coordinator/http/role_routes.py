"""Routes of the owner's roles: validators claim and judge, the trainer takes batches and publishes, the evaluator reports."""

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import FileResponse, RedirectResponse, Response

from shoal.coordinator import steps, submissions, verdicts
from shoal.coordinator.http.openapi import PARQUET
from shoal.coordinator.http.service import Service, Signed, until_changed
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError
from shoal.protocol import api

LONGEST_WAIT_S = 30.0
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {PARQUET: {"schema": {"type": "string", "format": "binary"}}}},
    307: {"description": "The file is in a bucket; the address is good for some minutes."},
}
SUBMISSION_ID = re.compile(r"[0-9a-f]{32}")


def owner_routes(service: Service) -> APIRouter:
    router, context = APIRouter(), service.context
    Caller = Annotated[Signed, Depends(service.caller)]
    Step = Annotated[int, Path(ge=0, le=1 << 53)]
    Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)]

    @router.get("/v1/submissions/{submission_id}/file", response_class=FileResponse, responses=FILE)
    async def submission_file(submission_id: str, caller: Caller) -> Response:
        if caller.key not in context.role_keys:
            raise RefusedError("role", "Rollouts are for the owner's roles.", status=403)
        if context.bucket is not None and SUBMISSION_ID.fullmatch(submission_id):
            return RedirectResponse(context.bucket.download_url(submission_id))
        if not SUBMISSION_ID.fullmatch(submission_id) or not context.file_of(submission_id).exists():
            raise RefusedError("unknown_submission", "There is no such submission.", status=404)
        return FileResponse(context.file_of(submission_id), media_type=PARQUET)

    @router.post("/v1/claims")
    async def claim(body: api.ClaimBody, caller: Caller) -> api.ClaimAnswer:
        context.require_role(caller.key, "validator")
        clock = asyncio.get_running_loop().time
        deadline, ticket = clock() + body.wait_s, service.bell.ticket()

        def operation(connection: Connection) -> api.ClaimAnswer:
            return submissions.claim(connection, context, caller.key, body)

        answer = await service.write(caller, operation)
        while answer.claim is None and answer.run_state != "finished" and not service.stopping:
            if (left_s := deadline - clock()) <= 0:
                break
            await until_changed(ticket, left_s)
            ticket = service.bell.ticket()
            answer = await service.again(operation)
        return answer

    @router.post("/v1/verdicts")
    async def verdict(body: api.VerdictBody, caller: Caller) -> api.VerdictAnswer:
        recorded = await service.write(
            caller, lambda connection: verdicts.record_verdict(connection, context, caller.key, body), rings=True
        )
        return api.VerdictAnswer(recorded=recorded)

    @router.get("/v1/batches/{step}")
    async def batch(step: Step, wait_s: Wait = 0.0) -> api.BatchAnswer:
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            ticket = service.bell.ticket()
            record = await service.read(lambda connection: steps.batch_record(connection, step))
            if record is not None:
                return api.BatchAnswer(batch=record)
            if service.stopping or (left_s := deadline - clock()) <= 0:
                break
            await until_changed(ticket, left_s)

        def what_is_missing(connection: Connection) -> api.BatchAnswer:
            waiting_for = steps.missing(connection, context, step)
            return api.BatchAnswer(waiting_for=waiting_for, run_state=steps.run_state(connection, context))

        return await service.read(what_is_missing)

    @router.post("/v1/versions")
    async def publish(body: api.VersionBody, caller: Caller) -> api.VersionAnswer:
        def operation(connection: Connection) -> api.VersionAnswer:
            head = steps.publish(connection, context, caller.key, body)
            return api.VersionAnswer(ledger_head=head, run_state=steps.run_state(connection, context))

        return await service.write(caller, operation, rings=True)

    @router.post("/v1/evaluations")
    async def evaluation(body: api.EvaluationBody, caller: Caller) -> api.EvaluationAnswer:
        await service.write(caller, lambda connection: steps.record_evaluation(connection, context, caller.key, body))
        return api.EvaluationAnswer(recorded=True)

    return router
