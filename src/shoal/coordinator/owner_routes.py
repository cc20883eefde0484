"""Routes of the owner's roles: validators claim and judge, the trainer takes batches and publishes, the evaluator reports."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse

from shoal.coordinator import assignments, judging
from shoal.coordinator.service import Service, Signed, until_changed
from shoal.errors import RefusedError
from shoal.protocol import api

LONGEST_WAIT_S = 30.0


def owner_routes(service: Service) -> APIRouter:
    router, context = APIRouter(), service.context
    Caller = Annotated[Signed, Depends(service.caller)]

    @router.get("/v1/submissions/{submission_id}/file")
    async def submission_file(submission_id: str, caller: Caller) -> FileResponse:
        if caller.key not in context.role_keys:
            raise RefusedError("role", "Rollouts are for the owner's roles.", status=403)
        path = context.file_of(submission_id) if submission_id.isalnum() else Path("/nonexistent")
        if not path.exists():
            raise RefusedError("unknown_submission", "There is no such submission.", status=404)
        return FileResponse(path, media_type="application/vnd.apache.parquet")

    @router.post("/v1/claims")
    async def claim(body: api.ClaimBody, caller: Caller) -> api.ClaimAnswer:
        context.require_role(caller.key, "validator")
        clock = asyncio.get_running_loop().time
        deadline, ticket = clock() + body.wait_s, service.bell.ticket()
        operation = judging.claim_operation(context, caller.key, body)
        answer = await service.write(caller, operation)
        while answer.claim is None and (left_s := deadline - clock()) > 0:
            await until_changed(ticket, left_s)
            ticket = service.bell.ticket()
            answer = await service.again(operation)
        return answer

    @router.post("/v1/verdicts")
    async def verdict(body: api.VerdictBody, caller: Caller) -> api.VerdictAnswer:
        recorded = await service.write(
            caller, lambda connection: judging.record_verdict(connection, context, caller.key, body)
        )
        return api.VerdictAnswer(recorded=recorded)

    @router.get("/v1/batches/{step}")
    async def batch(step: int, wait_s: float = 0.0) -> api.BatchAnswer:
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, LONGEST_WAIT_S)
        while True:
            ticket = service.bell.ticket()
            answer = await service.read(lambda connection: judging.batch_record(connection, context, step))
            if answer.batch is not None or (left_s := deadline - clock()) <= 0:
                return answer
            await until_changed(ticket, left_s)

    @router.post("/v1/versions")
    async def publish(body: api.VersionBody, caller: Caller) -> api.VersionAnswer:
        def operation(connection: sqlite3.Connection) -> api.VersionAnswer:
            head = judging.publish(connection, context, caller.key, body)
            return api.VersionAnswer(ledger_head=head, run_state=assignments.run_state(connection, context))

        return await service.write(caller, operation)

    @router.post("/v1/evaluations")
    async def evaluation(body: api.EvaluationBody, caller: Caller) -> api.EvaluationAnswer:
        await service.write(caller, lambda connection: judging.record_evaluation(connection, context, caller.key, body))
        return api.EvaluationAnswer(recorded=True)

    return router
