"""Content-addressed files in one directory, and streams that are cut into them.

`ShardStore` holds `manifests/<digest>`, `shards/<digest>` and the head; a file under its final name is whole. Files are not synced
one by one (a model has thousands); instead what an earlier process left counts only after `recover` has hashed it, which happens
when it is first needed. `AccessTimes` says what was asked for lately, `ShardCutter` cuts a stream into shards, `Trash` deletes
directories in the background.
"""

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Literal, TypeVar

from shoal.broadcast.manifest import ShardEntry
from shoal.errors import IntegrityError, UnavailableError
from shoal.files import TEMPORARY_PREFIX, digest_bytes, digest_file, is_digest, write_atomic

Folder = Literal["shards", "manifests"]
FOLDERS: tuple[Folder, ...] = ("shards", "manifests")
HEAD_FILE = "head.json"
SHARDS_AHEAD = 4

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


class DiskError(UnavailableError):
    """The disk takes no more bytes, or gives none."""

    code = "disk"


class ShardStore:
    """Safe to use from several threads; listeners are called from the writing thread with a digest or HEAD_FILE."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.access = AccessTimes(clock=clock)
        self.listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._held: dict[Folder, set[str]] = {folder: set() for folder in FOLDERS}
        self._found: dict[Folder, set[str]] = {}
        for folder in FOLDERS:
            make_directory(root / folder)
            self._found[folder] = {entry.name for entry in os.scandir(root / folder) if is_digest(entry.name)}

    def path(self, folder: Folder, digest: str) -> Path:
        if not is_digest(digest):
            raise IntegrityError(f"{digest[:80]!r} is not a digest.")
        return self.root / folder / digest

    def has(self, folder: Folder, digest: str) -> bool:
        """Whether the file is here and this process wrote or verified it."""
        return digest in self._held[folder]

    def recover(self, folder: Folder, digest: str) -> bool:
        """Whether the file is here; one that an earlier process left is hashed first, and removed if it is damaged."""
        if digest in self._found[folder]:
            if self._matches(folder, digest):
                self._keep(folder, digest)
            else:
                self._discard_found(folder, digest)
        return self.has(folder, digest)

    def may_have(self, folder: Folder, digest: str) -> bool:
        """Whether `recover` could find it."""
        return digest in self._held[folder] or digest in self._found[folder]

    def held(self, folder: Folder) -> set[str]:
        """All files of the folder, those that are not verified yet included."""
        with self._lock:
            return self._held[folder] | self._found[folder]

    def put(self, folder: Folder, data: Bytes, digest: str | None = None) -> str:
        """Store bytes under their digest; a `digest` that is given has been checked by the caller."""
        digest = digest or digest_bytes(memoryview(data))
        if not self.has(folder, digest):
            with self._lock:
                self._found[folder].discard(digest)  # or a check of the old bytes could remove the new ones
            self._write(self.path(folder, digest), data, sync=False)
        self._keep(folder, digest)
        return digest

    def put_head(self, data: bytes, *, sync: bool = False) -> None:
        """Replace the head. A publisher syncs it, because its counter must never fall; a relay can fetch it again."""
        self._write(self.root / HEAD_FILE, data, sync=sync)
        self._notify(HEAD_FILE)

    def head(self) -> bytes | None:
        try:
            return (self.root / HEAD_FILE).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(error, self.root / HEAD_FILE) from error

    def read(self, folder: Folder, digest: str) -> bytes:
        return self.path(folder, digest).read_bytes()

    def remove(self, folder: Folder, digests: Iterable[str]) -> int:
        """Delete files; one that a server has open stays readable for that reader."""
        count = 0
        for digest in digests:
            with self._lock:
                self._held[folder].discard(digest)
                self._found[folder].discard(digest)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(folder, digest))
                count += 1
        return count

    def remove_leftovers(self) -> None:
        """Remove what interrupted writes left; for the only process that writes here."""
        for folder in FOLDERS:
            for leftover in (self.root / folder).glob(f"{TEMPORARY_PREFIX}*"):
                leftover.unlink(missing_ok=True)

    def _discard_found(self, folder: Folder, digest: str) -> None:
        """Remove a damaged file, unless somebody has replaced it since it was looked at."""
        with self._lock:
            if digest in self._found[folder]:
                self._found[folder].discard(digest)
                with contextlib.suppress(OSError):  # it counts no more; a write reports such a disk
                    self.path(folder, digest).unlink()

    def _keep(self, folder: Folder, digest: str) -> None:
        with self._lock:
            self._held[folder].add(digest)
            self._found[folder].discard(digest)
        self._notify(digest)

    def _write(self, path: Path, data: Bytes, *, sync: bool) -> None:
        try:
            write_atomic(path, data, sync=sync)
        except OSError as error:
            raise disk_error(error, path) from error

    def _notify(self, name: str) -> None:
        for listener in list(self.listeners):
            listener(name)

    def _matches(self, folder: Folder, digest: str) -> bool:
        try:
            return digest_file(self.path(folder, digest)) == digest
        except OSError:
            return False


class AccessTimes:
    """When each file was last asked for, so that nothing is pruned while somebody is still fetching it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def touch(self, digest: str) -> None:
        self._last[digest] = self._clock()

    def active(self, digests: Iterable[str], within_s: float) -> bool:
        since = self._clock() - within_s
        return any(self._last.get(digest, float("-inf")) >= since for digest in digests)

    def forget(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._last.pop(digest, None)


class ShardCutter:
    """Cuts a stream of bytes into shards, hashed and written on a few threads with bounded memory.

    Few of them are in flight, so a model of any size needs a few megabytes; an error of a writer surfaces at the next call.
    """

    def __init__(self, store: ShardStore, shard_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._shard_bytes = shard_bytes
        self._pool = pool
        self._parts: list[memoryview] = []
        self._size = 0
        self._digest: Callable[[], str] | None = None
        """Of the parts, if they are one leaf."""
        self._pending: deque[Future[ShardEntry]] = deque()
        self._shards: list[ShardEntry] = []

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the stream; they must not change until `finish` returns."""
        view = memoryview(data)
        while len(view):
            part = view[: self._shard_bytes - self._size]
            self._add(part)
            view = view[len(part) :]
            if self._size == self._shard_bytes:
                self._cut()

    def feed_leaf(self, data: memoryview, digest: Callable[[], str]) -> None:
        """Take bytes that are not divided if a shard can hold them; `digest` gives theirs, and a shard's that is they alone."""
        if len(data) > self._shard_bytes:
            self.feed(data)
            return
        if self._size + len(data) > self._shard_bytes:
            self._cut()
        self._add(data)
        if self._size == len(data):
            self._digest = digest

    def finish(self) -> tuple[ShardEntry, ...]:
        self._cut()
        while self._pending:
            self._shards.append(self._pending.popleft().result())
        return tuple(self._shards)

    def _add(self, part: memoryview) -> None:
        if len(part):
            self._parts.append(part)
            self._size += len(part)
            self._digest = None

    def _cut(self) -> None:
        if not self._parts:
            return
        if len(self._pending) >= SHARDS_AHEAD:
            self._shards.append(self._pending.popleft().result())
        self._pending.append(self._pool.submit(self._write, self._parts, self._digest))
        self._parts, self._size, self._digest = [], 0, None

    def _write(self, parts: list[memoryview], known: Callable[[], str] | None) -> ShardEntry:
        data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        digest = known() if known is not None else digest_bytes(data)
        self._store.put("shards", data, digest)
        return ShardEntry(digest=digest, size_bytes=len(data))


class Trash:
    """Deletes directories in the background: they leave their place at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads: list[threading.Thread] = []
        shutil.rmtree(directory, ignore_errors=True)
        make_directory(directory)

    def drop(self, path: Path) -> None:
        doomed = self._directory / secrets.token_hex(8)
        try:
            os.replace(path, doomed)
        except OSError as error:
            raise disk_error(error, path) from error
        thread = threading.Thread(target=shutil.rmtree, args=(doomed, True), name="trash", daemon=True)
        self._threads = [alive for alive in self._threads if alive.is_alive()] + [thread]
        thread.start()

    def retry(self, make: Callable[[], T]) -> T:
        """Once more if the disk was full while something was being deleted: that takes space until it is gone."""
        busy = [thread for thread in self._threads if thread.is_alive()]
        try:
            return make()
        except DiskError:
            if not busy:
                raise
        self.close()
        return make()

    def close(self) -> None:
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def open_to_read(path: Path) -> Iterator[FileIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise unreadable(error, path) from error


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error


def unreadable(error: OSError, path: Path) -> DiskError:
    hint = "Was it deleted, or is the disk damaged? A restart notices what is missing."
    return DiskError(f"{path} cannot be read: {error.strerror}.", hint=hint)


def disk_error(error: OSError, path: Path) -> DiskError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space, or name another directory."
        return DiskError(f"There is no space on the disk for {path}.", hint=hint)
    hint = "Name a directory that this user may write to, or change the owner or mode of this one."
    return DiskError(f"{path} cannot be written: {error.strerror}.", hint=hint)
