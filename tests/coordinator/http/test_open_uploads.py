"""Uploads whose bytes are still arriving: one per lease, and no more than the disk can hold."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.coordinator.http import open_uploads
from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.body import BodyReader
from shoal.coordinator.http.handlers import uploads as upload_handlers
from shoal.coordinator.http.open_uploads import OpenUploads
from shoal.coordinator.http.route import Upload
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.protocol.signing import submission_message
from support.samples import keypair
from support.swarm import Swarm

DATA = b"rollouts"
Outcome = api.SubmissionAnswer | RefusedError


class Body:
    """Sends its first half at once and the second when it may."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.asked, self.goes_on = data, asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, object]:
        if not self.asked.is_set():
            self.asked.set()
            return {"type": "http.request", "body": self.data[:4], "more_body": True}
        await self.goes_on.wait()
        return {"type": "http.request", "body": self.data[4:], "more_body": False}


def submit(swarm: Swarm, lease_id: str, body: Body, nonce: str) -> "asyncio.Task[Outcome]":
    ann, digest = keypair("ann"), digest_bytes(body.data)
    evidence = ann.sign(submission_message("run-1", lease_id, digest))
    upload = Upload(lease_id, digest, evidence, BodyReader(body.receive))
    caller = Signed(ann.public, swarm.clock(), nonce, digest)

    async def outcome() -> Outcome:
        try:
            return await upload_handlers.submit(swarm.app.service, upload, caller)
        except RefusedError as refused:
            return refused

    return asyncio.create_task(outcome())


def in_server(swarm: Swarm, test: Callable[[str], object]) -> None:
    """Runs in the loop that serves the swarm, with a lease of ann."""
    swarm.publish(0)
    (ann,) = swarm.join("ann")
    lease = swarm.lease(ann)
    assert swarm.http.portal is not None
    swarm.http.portal.call(test, lease.lease_id)


def test_a_newer_upload_of_a_lease_ends_the_older_one_and_its_file(swarm: Swarm) -> None:
    async def test(lease_id: str) -> None:
        bodies = [Body() for _ in range(5)]
        tasks = []
        for number, body in enumerate(bodies):
            tasks.append(submit(swarm, lease_id, body, f"{number:032}"))
            await body.asked.wait()
        for older in tasks[:-1]:
            refused = await older
            assert isinstance(refused, RefusedError)
            assert refused.code == "superseded"
        assert len(list(swarm.run.submissions.iterdir())) == 1
        bodies[-1].goes_on.set()
        answer = await tasks[-1]
        assert isinstance(answer, api.SubmissionAnswer)
        assert swarm.run.file_of(answer.submission_id).read_bytes() == DATA
        assert len(swarm.app.service.uploads) == 0

    in_server(swarm, test)
    assert len(list(swarm.run.submissions.iterdir())) == 1


def test_a_request_that_is_cancelled_leaves_no_file_and_no_open_upload(swarm: Swarm) -> None:
    async def test(lease_id: str) -> None:
        body = Body()
        task = submit(swarm, lease_id, body, "0" * 32)
        await body.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(swarm.app.service.uploads) == 0

    in_server(swarm, test)
    assert list(swarm.run.submissions.iterdir()) == []


def test_bytes_are_counted_against_the_free_space_while_they_arrive(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_uploads, "CHECK_EVERY_BYTES", 1)

    def left(folder: Path) -> int:
        return 1003 - sum(file.stat().st_size for file in folder.iterdir())

    async def test(lease_id: str) -> None:
        swarm.alter(free_bytes=left, min_free_bytes=1000)
        body = Body()
        refused = await submit(swarm, lease_id, body, "0" * 32)
        assert isinstance(refused, RefusedError)
        assert (refused.code, refused.status) == ("disk_full", 503)

    # The file system is asked while the file is open, so its bytes must not wait in a buffer of ours.
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: original(path, mode, buffering=0))
    in_server(swarm, test)
    assert list(swarm.run.submissions.iterdir()) == []


def test_what_strangers_are_sending_leaves_space_for_keys_with_accepted_work(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_uploads, "CHECK_EVERY_BYTES", 1)
    uploads, arrived = OpenUploads(swarm.run), 0
    swarm.alter(free_bytes=lambda _: 1100 - arrived, min_free_bytes=1000)
    with uploads.counted(is_stranger=True) as count, uploads.counted(is_stranger=False) as count_proven:
        for _ in range(5):
            arrived += 10
            count(10)
        arrived += 1
        with pytest.raises(RefusedError, match="disk is full"):
            count(1)
        with pytest.raises(RefusedError):
            uploads.require_space(is_stranger=True)
        for _ in range(4):
            arrived += 10
            count_proven(10)
    arrived = 0
    uploads.require_space(is_stranger=True)
