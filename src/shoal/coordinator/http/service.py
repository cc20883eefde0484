"""How an HTTP request becomes an operation on the store: authentication, nonces, uploads, waiting for changes."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blake3 import blake3
from fastapi import Request

from shoal.coordinator import nonces
from shoal.coordinator.context import Context, Stamp
from shoal.coordinator.http.limits import RateLimit
from shoal.coordinator.http.refusals import too_many
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.loop_results import Letter, Mailbox
from shoal.coordinator.store.writer import Store
from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol.signing import RequestStamp, check_stamp

Result = TypeVar("Result")

UPLOADS_SYNCED_AT_ONCE = 32
"""Syncs that run at the same time share commits of the file system's journal."""


class Bell:
    """Wakes whoever waits for a change. A ticket taken before looking makes sure that no change is missed in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        return self._event

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def until_changed(ticket: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ticket.wait(), timeout_s)


@dataclass(frozen=True)
class Signed:
    """Who asks; `spend` uses the request's nonce up inside the operation's transaction."""

    key: str
    at: float
    nonce: str

    @property
    def stamp(self) -> Stamp:
        return self.at, self.nonce

    def spend(self, connection: Connection) -> None:
        nonces.spend(connection, self.key, self.at, self.nonce)


class Service:
    """Store, context and bell, and the way operations run on them."""

    def __init__(self, store: Store, context: Context) -> None:
        self.store, self.context, self.bell = store, context, Bell()
        settings = context.config.coordinator
        self.key_limit = RateLimit(settings.requests_per_s_key, context.clock)
        self.address_limit = RateLimit(settings.requests_per_s_address, context.clock)
        self.stopping = False
        self._mailbox = Mailbox()
        self._syncers = ThreadPoolExecutor(UPLOADS_SYNCED_AT_ONCE, "upload-sync")

    def close(self) -> None:
        self._syncers.shutdown(wait=False)

    def listen(self) -> None:
        """Rings whenever a change is on disk, whichever process made it. Belongs to the running loop."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                loop.call_soon_threadsafe(self.bell.ring)

        self.store.on_change(heard)

    def stop_waiting(self) -> None:
        """Answers everybody who waits with what there is, so that a stop takes no longer than a request."""
        self.stopping = True
        self.bell.ring()

    async def write(self, signed: Signed, operation: Callable[[Connection], Result], *, rings: bool = False) -> Result:
        """Runs a state change once; rings if it may be what a validator or the trainer waits for."""

        def work(connection: Connection) -> Result:
            signed.spend(connection)
            return operation(connection)

        announces: Callable[[Result], bool] | None = (lambda _: True) if rings else None
        return await self._submit(work, announces)

    async def maintain(self, operation: Callable[[Connection], bool]) -> None:
        await self._submit(operation, bool)

    async def again(self, operation: Callable[[Connection], Result]) -> Result:
        """Repeats an operation of a request whose nonce is already spent."""
        return await self._submit(operation)

    async def _submit(
        self, operation: Callable[[Connection], Result], announces: Callable[[Result], bool] | None = None
    ) -> Result:
        letter: Letter[Result] = self._mailbox.expect()  # type: ignore[assignment]  # whatever the operation returns
        self.store.enqueue(operation, letter, announces)
        return await letter.future

    async def read(self, operation: Callable[[Connection], Result]) -> Result:
        """One committed state of the store, for as long as it takes."""
        return await asyncio.to_thread(self.store.read, operation)

    async def glance(self, operation: Callable[[Connection], Result]) -> Result:
        """A look at a few rows found by an index. In a local file that takes less than to ask a thread for it."""
        if self.store.database.is_shared:
            return await asyncio.to_thread(self.store.glance, operation)
        return self.store.glance(operation)

    async def sync(self, file: int) -> None:
        """Waits until a file is on disk; readers of the store do not queue behind it."""
        await asyncio.get_running_loop().run_in_executor(self._syncers, os.fsync, file)

    async def caller(self, request: Request) -> Signed:
        """Who signed this request; a dependency of every route that changes state."""
        return self.authenticate(request, digest_bytes(await request.body()))

    def authenticate(self, request: Request, body_digest: str) -> Signed:
        stamp = RequestStamp.from_headers(request.headers)
        window_s = self.context.config.coordinator.clock_window_s
        self.check_clock(float(stamp.time), window_s)
        descriptor = self.context.descriptor
        check_stamp(
            stamp,
            descriptor.run_id,
            descriptor.coordinator_key,
            request.method,
            request.scope["path"],  # not request.url, which is pieced together with the Host header
            request.scope["query_string"].decode("latin-1"),
            body_digest,
        )
        self._limit(stamp.key)
        return Signed(stamp.key, float(stamp.time), stamp.nonce)

    def _limit(self, key: str) -> None:
        if key in self.context.role_keys or key == self.context.descriptor.run_key:
            return
        if wait_s := self.key_limit.wait_s(key):
            raise too_many("This key asks too often.", wait_s)

    def check_clock(self, at: float, window_s: float) -> None:
        if abs(at - self.context.clock()) > window_s:
            hint = "The answer carries the server's time; sign again with it."
            raise RefusedError("clock", "The request's time is too far from the server's.", hint=hint, status=401)


async def stream_to_disk(service: Service, request: Request, path: Path, limit: int) -> tuple[str, int]:
    """Digest and size of the body, which is safely on disk; no file if anything went wrong."""
    hasher, size_bytes = blake3(), 0
    try:
        with path.open("wb") as file:
            async for chunk in bounded_stream(request, limit):
                size_bytes += len(chunk)
                hasher.update(chunk)
                file.write(chunk)
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


async def bounded_stream(request: Request, limit: int) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > limit:
            raise RefusedError("too_large", f"The upload is larger than {limit} bytes.", status=413)
        yield chunk
