"""What the owner's roles ask for: validators claim and verify, the trainer takes batches and publishes, the evaluator reports."""

import asyncio
import re

from starlette.responses import FileResponse, RedirectResponse, Response

from shoal.coordinator.batching import recalls, screening, steps
from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.route import PARQUET
from shoal.coordinator.http.service import Service
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.records import lease_of_file
from shoal.coordinator.work import submissions, verdicts
from shoal.errors import RefusedError
from shoal.files import write_atomic
from shoal.protocol import api, page_views

SUBMISSION_ID = re.compile(r"[0-9a-f]{32}")


async def submission_file(service: Service, body: api.SubmissionAddress, caller: Signed) -> Response:
    """The rollouts of a submission, from this disk or by a URL of the run's bucket."""
    run, submission_id = service.run, body.submission_id
    if run.bucket is not None and SUBMISSION_ID.fullmatch(submission_id):
        return RedirectResponse(run.bucket.download_url(submission_id))
    if not SUBMISSION_ID.fullmatch(submission_id) or not run.file_of(submission_id).exists():
        raise RefusedError("unknown_submission", "There is no such submission.", status=404)
    return FileResponse(run.file_of(submission_id), media_type=PARQUET)


async def claim(service: Service, body: api.ClaimBody, caller: Signed) -> api.ClaimAnswer:
    """The next submissions to verify, or versions to get for it; waits up to `wait_s` for either."""
    clock = asyncio.get_running_loop().time
    deadline, version = clock() + body.wait_s, service.changes.version
    service.run.presence.validator_seen_at = service.run.clock()

    def operation(connection: Connection) -> api.ClaimAnswer:
        return submissions.claim(connection, service.run, caller.key, body)

    answer = await service.write(caller, operation)
    while not (answer.claim or answer.missing or answer.newest or answer.run_state == "finished" or service.stopping):
        if (left_s := deadline - clock()) <= 0:
            break
        await service.changes.wait_changed(version, left_s)
        version = service.changes.version
        answer = await service.write_unsigned(operation)
    return answer


async def verdict(service: Service, body: api.VerdictBody, caller: Signed) -> api.VerdictAnswer:
    """Records a verdict once, and all that follows from it."""
    recorded = await service.write(
        caller, lambda connection: verdicts.record_verdict(connection, service.run, body), notifies=True
    )
    if recorded:
        await _note_verdict(service, body)
    return api.VerdictAnswer(recorded=recorded)


async def _note_verdict(service: Service, body: api.VerdictBody) -> None:
    """For the rate of its key, the page, Prometheus and the file of events."""
    lease = await service.read_rows(lambda connection: lease_of_file(connection, body.submission_id))
    assert lease is not None, "its verdict was recorded"
    if body.accepted:
        service.gate.note_accepted(lease.worker)
    service.run.metrics.event(
        "verdict",
        worker=lease.worker,
        step=lease.step,
        slot=lease.slot,
        outcome="accepted" if body.accepted else "rejected",
        reasons=[str(reason) for reason in body.reasons],
        audited=bool(body.audited_groups),
        tokens=sum(group.tokens for group in body.groups),
        seconds=round(body.seconds, 3),
    )


async def trace(service: Service, body: page_views.AuditTrace, caller: Signed) -> None:
    """Keeps what an audit saw token by token, beside the rollout file, for the owner's page; best effort."""
    run = service.run
    if await service.read_rows(lambda connection: lease_of_file(connection, body.submission_id)) is None:
        raise RefusedError("unknown_submission", "There is no such submission.", status=404)
    try:
        await asyncio.to_thread(write_atomic, run.trace_of(body.submission_id), body.model_dump_json().encode())
    except OSError as error:
        run.metrics.event("trace_lost", reason=str(error))


async def batch(service: Service, body: api.BatchAddress, caller: Signed) -> api.BatchAnswer:
    """The batch of a step; waits up to `wait_s` for it, then says what is missing."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + body.wait_s
    while True:
        version = service.changes.version
        record = await service.read(lambda connection: _batch(connection, body))
        if record is not None:
            return api.BatchAnswer(batch=record)
        if service.stopping or (left_s := deadline - clock()) <= 0:
            break
        await service.changes.wait_changed(version, left_s)

    def what_is_missing(connection: Connection) -> api.BatchAnswer:
        waiting_for = steps.missing(connection, service.run, body.step)
        return api.BatchAnswer(waiting_for=waiting_for, run_state=steps.run_state(connection, service.run))

    return await service.read(what_is_missing)


def _batch(connection: Connection, body: api.BatchAddress) -> api.BatchRecord | None:
    steps.require_epoch(connection, body.epoch)
    return steps.batch_record(connection, body.step)


async def screen(service: Service, body: api.ScreeningBody, caller: Signed) -> api.BatchRecord:
    """Records a proposed batch without the groups that the trainer finds improbable, or proposes other groups for them."""
    return await service.write(
        caller, lambda connection: screening.screen(connection, service.run, body), notifies=True
    )


async def recall_batch(service: Service, body: api.RecallBody, caller: Signed) -> api.RecallAnswer:
    """Takes back a batch that no version was trained on yet; all of it is audited before it is proposed again."""

    def operation(connection: Connection) -> int:
        if body.epoch is not None:
            steps.require_epoch(connection, body.epoch)
        groups = recalls.recall(connection, service.run, body)
        recalls.propose_again(connection, service.run)
        return groups

    return api.RecallAnswer(groups=await service.write(caller, operation, notifies=True))


async def publish(service: Service, body: api.VersionBody, caller: Signed) -> api.VersionAnswer:
    """Records a version of the policy once."""

    def operation(connection: Connection) -> str:
        steps.publish(connection, service.run, body)
        return service.heads.newest(connection)

    head = await service.write(caller, operation, notifies=True)
    service.run.metrics.event("version", **body.report | {"version": body.version, "bytes_total": body.bytes_total})
    return api.VersionAnswer(ledger_head=head)


async def evaluation(service: Service, body: api.EvaluationBody, caller: Signed) -> None:
    """Records what a version reached on the held-out problems."""
    await service.write(caller, lambda connection: steps.record_evaluation(connection, service.run, body))
    service.run.metrics.event("evaluation", version=body.version, accuracy=body.accuracy, problems=body.problems)
