"""Content-addressed files in one directory, and who has read them lately.

`Store` holds `manifests/<digest>` and `shards/<digest>`; a file under its final name is whole. Files are not synced one by
one (a model has thousands); instead a restarted owner calls `verify`, which drops whatever does not match its name.
"""

import contextlib
import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from shoal.errors import IntegrityError, UnavailableError
from shoal.files import TEMPORARY_PREFIX, digest_bytes, digest_file, is_digest, write_atomic

Folder = Literal["shards", "manifests"]
HEAD_FILE = "head.json"
FOLDERS: tuple[Folder, ...] = ("shards", "manifests")


class NoRoomError(UnavailableError):
    """The disk takes no more bytes."""

    code = "no_room"


class Store:
    """Safe to use from several threads; listeners are called from the writing thread with a digest or HEAD_FILE."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.access = AccessTimes(clock=clock)
        self.listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._held: dict[Folder, set[str]] = {}
        for folder in FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
            self._held[folder] = {entry.name for entry in os.scandir(root / folder) if is_digest(entry.name)}

    def path(self, folder: Folder, digest: str) -> Path:
        if not is_digest(digest):
            raise IntegrityError(f"{digest[:80]!r} is not a digest.")
        return self.root / folder / digest

    def has(self, folder: Folder, digest: str) -> bool:
        return digest in self._held[folder]

    def held(self, folder: Folder) -> set[str]:
        with self._lock:
            return set(self._held[folder])

    def put(self, folder: Folder, data: bytes | bytearray | memoryview, digest: str | None = None) -> str:
        """Store bytes under their digest; a `digest` that is given has been checked by the caller."""
        digest = digest or digest_bytes(memoryview(data))
        if not self.has(folder, digest):
            write_whole(self.path(folder, digest), data)
            with self._lock:
                self._held[folder].add(digest)
        self._notify(digest)
        return digest

    def put_head(self, data: bytes, *, sync: bool = False) -> None:
        """Replace the head. A publisher syncs it, because its counter must never fall; a relay can fetch it again."""
        if sync:
            write_atomic(self.root / HEAD_FILE, data)
        else:
            write_whole(self.root / HEAD_FILE, data)
        self._notify(HEAD_FILE)

    def head(self) -> bytes | None:
        try:
            return (self.root / HEAD_FILE).read_bytes()
        except FileNotFoundError:
            return None

    def read(self, folder: Folder, digest: str) -> bytes:
        return self.path(folder, digest).read_bytes()

    def remove(self, folder: Folder, digests: Iterable[str]) -> int:
        """Delete files; one that a server has open stays readable for that reader."""
        count = 0
        for digest in digests:
            with self._lock:
                self._held[folder].discard(digest)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(folder, digest))
                count += 1
        return count

    def verify(self) -> int:
        """Drop every file that does not match its name, and what an interrupted write left; returns how many."""
        dropped = 0
        for folder in FOLDERS:
            for leftover in (self.root / folder).glob(f"{TEMPORARY_PREFIX}*"):
                leftover.unlink(missing_ok=True)
            wrong = [digest for digest in self.held(folder) if not self._matches(folder, digest)]
            dropped += self.remove(folder, wrong)
        return dropped

    def _notify(self, name: str) -> None:
        for listener in list(self.listeners):
            listener(name)

    def _matches(self, folder: Folder, digest: str) -> bool:
        try:
            return digest_file(self.path(folder, digest)) == digest
        except OSError:
            return False


class AccessTimes:
    """When each file was last asked for, so that nothing is pruned under somebody who is still fetching it."""

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


def map_file(path: Path) -> memoryview:
    """The bytes of a file, read from disk as they are used; unmapped when the last view of them is gone."""
    if path.stat().st_size == 0:
        return memoryview(b"")
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Temporary file and rename, without the sync of `write_atomic`: verification, not the disk, vouches for the bytes."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with open(temporary, "wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view) :]
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> "NoRoomError":
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space, or name another directory."
        return NoRoomError(f"There is no room on the disk for {path}.", hint=hint)
    return NoRoomError(f"{path} cannot be written: {error.strerror}.")
