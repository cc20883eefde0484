"""Bytes at rest: content digests and writes that are whole or absent.

A digest is 64 hex digits of BLAKE3. `write_atomic` goes through a temporary file in the same directory, is synced and
renamed, so a reader or a killed process never sees half a file.
"""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from blake3 import blake3

DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
TEMPORARY_PREFIX = ".tmp-"


def digest_bytes(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def is_digest(text: str) -> bool:
    return DIGEST_PATTERN.fullmatch(text) is not None


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
