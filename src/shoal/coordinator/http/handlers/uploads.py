"""How rollouts arrive: a file streamed to this disk and hashed on the way, or by a URL of the run's bucket."""

import errno
import math
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from blake3 import blake3

from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.body import BodyLimit
from shoal.coordinator.http.refusals import too_large
from shoal.coordinator.http.route import Upload
from shoal.coordinator.http.service import Service
from shoal.coordinator.run import Run
from shoal.coordinator.store.database import Transaction
from shoal.coordinator.store.tables import LeaseRow
from shoal.coordinator.work import submissions
from shoal.coordinator.work.submissions import ReceivedFile
from shoal.errors import RefusedError
from shoal.protocol import api

REPEATED_UPLOAD_S = 60.0
"""For a file that was taken in before and whose answer was lost."""


async def submit(service: Service, upload: Upload, caller: Signed) -> api.SubmissionAnswer:
    """Takes the rollouts of a lease in. The same file again gets the same answer."""
    run, is_stranger = service.run, not service.gate.is_proven(caller.key)
    service.uploads.require_space(is_stranger=is_stranger)
    lease = await _expect(service, caller, upload.lease_id, upload.digest, upload.signature)
    left_s = lease.expires_at - run.clock() if lease is not None else REPEATED_UPLOAD_S
    chunks = upload.body.chunks(BodyLimit(run.largest_file_bytes, left_s))
    submission_id = uuid.uuid4().hex
    path = run.file_of(submission_id)

    async def receive() -> tuple[str, int]:
        with service.uploads.counted(is_stranger=is_stranger) as count:
            return await stream_to_disk(service, chunks, path, count)

    digest, size_bytes = await service.uploads.receive(upload.lease_id, receive())
    file = ReceivedFile(caller.key, upload.lease_id, submission_id, digest, size_bytes, upload.signature)

    def operation(connection: Transaction) -> api.SubmissionAnswer:
        _require_signed(digest, upload.digest)
        return submissions.accept_upload(connection, run, file)

    try:
        answer = await _take_in(service, caller, operation)
    except Exception:  # a cancelled request may still be kept by the store: then the file must stay
        path.unlink(missing_ok=True)
        raise
    if answer.submission_id != submission_id:
        path.unlink(missing_ok=True)
    else:
        run.metrics.count("submitted")
        service.uploads.kept(size_bytes if is_stranger else 0)
    return answer


async def upload_url(service: Service, body: api.UploadBody, caller: Signed) -> api.UploadAnswer:
    """Where in the run's bucket the file of a lease may be put."""
    if body.size_bytes > service.run.largest_file_bytes:
        raise too_large(service.run.largest_file_bytes)
    lease = await _expect(service, caller, body.lease_id, body.digest, body.signature)
    if service.run.bucket is None:
        return api.UploadAnswer(url="")
    left_s = lease.expires_at - service.run.clock() if lease is not None else REPEATED_UPLOAD_S
    place = incoming_name(service.run, body.lease_id)
    return api.UploadAnswer(url=service.run.bucket.upload_url(place, body.size_bytes, max(1, math.ceil(left_s))))


async def uploaded(service: Service, body: api.UploadBody, caller: Signed) -> api.SubmissionAnswer:
    """Takes a file in that is in the bucket."""
    run, bucket = service.run, service.run.bucket
    if bucket is None:
        raise RefusedError("no_bucket", "This run takes rollouts itself.", hint="Use PUT.", status=409)
    lease = await _expect(service, caller, body.lease_id, body.digest, body.signature)
    place, name = incoming_name(run, body.lease_id), bucket_name(run, body.lease_id, body.digest)
    if lease is not None:
        transfer = bucket.take_in(place, name, body.size_bytes, body.digest)
        await service.uploads.receive(body.lease_id, transfer)
    file = ReceivedFile(caller.key, body.lease_id, name, body.digest, body.size_bytes, body.signature)
    answer = await _take_in(service, caller, lambda connection: submissions.accept_upload(connection, run, file))
    await bucket.forget_upload(place)
    return answer


async def _take_in(
    service: Service, caller: Signed, operation: Callable[[Transaction], api.SubmissionAnswer]
) -> api.SubmissionAnswer:
    """Validators may be waiting for it, and the key for room for another lease."""

    def work(connection: Transaction) -> api.SubmissionAnswer:
        connection.on_commit(lambda: service.note_delivery(caller.key))
        return operation(connection)

    return await service.write(caller, work, notifies=True)


def incoming_name(run: Run, lease_id: str) -> str:
    """Where a sender puts its file: one place per lease, so that a lease never fills more than that."""
    return blake3(f"incoming\n{lease_id}".encode(), key=run.secret).hexdigest()[:32]


def bucket_name(run: Run, lease_id: str, digest: str) -> str:
    """The same name whenever the same file is announced, and one that nobody else can guess."""
    return blake3(f"upload\n{lease_id}\n{digest}".encode(), key=run.secret).hexdigest()[:32]


async def _expect(service: Service, caller: Signed, lease_id: str, digest: str, signature: str) -> LeaseRow | None:
    """The lease that this file answers, none if the file was taken before; anything else is refused."""
    run = service.run
    lease = await service.read_rows(
        lambda connection: submissions.check_upload(connection, run, caller.key, lease_id, digest)
    )
    if lease is not None:
        submissions.verify_upload(run, caller.key, lease_id, digest, signature)
    return lease


def _require_signed(digest: str, signed: str) -> None:
    if digest != signed:
        raise RefusedError("digest", "The uploaded bytes are not those that were signed.", status=400)


async def stream_to_disk(
    service: Service, chunks: AsyncIterator[bytes], path: Path, count: Callable[[int], None]
) -> tuple[str, int]:
    """Digest and size of the file, which is synced to disk; no file if anything went wrong."""
    hasher, size_bytes = blake3(), 0
    try:
        with path.open("wb") as file:
            async for chunk in chunks:
                size_bytes += len(chunk)
                hasher.update(chunk)
                file.write(chunk)
                count(len(chunk))
            file.flush()
            await service.sync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        hint = "The owner must free disk space; nothing is lost, your work can be uploaded until its lease ends."
        code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "storage"
        raise RefusedError(code, f"The upload cannot be stored: {error.strerror}.", hint=hint, status=503) from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return hasher.hexdigest(), size_bytes
