"""Content digests, and files that are whole or absent.

A digest is 64 hex digits of BLAKE3. `atomic_file` and `write_atomic` write a temporary file in the same directory, sync it and
rename it, so that neither a reader nor a killed process leaves half a file under the final name. What a killed process left under
a temporary name is removed by the next one that starts there.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import Field

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
TEMPORARY_PREFIX = ".tmp-"
# Files of a model directory.
CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"


def digest_bytes(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def is_digest(text: str) -> bool:
    return DIGEST_PATTERN.fullmatch(text) is not None


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o644, sync: bool = True) -> Iterator[BufferedWriter]:
    """A file to write; it gets its name when the context ends without an error, and leaves nothing behind otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{os.getpid()}-", dir=path.parent)
    os.close(handle)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_atomic(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o644, sync: bool = True) -> None:
    with atomic_file(path, mode=mode, sync=sync) as file:
        file.write(data)


def remove_leftovers(*directories: Path) -> int:
    """Removes temporary files of writers that no longer live; directories may be shared by several processes."""
    removed = 0
    for directory in directories:
        for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
            writer = path.name.removeprefix(TEMPORARY_PREFIX).partition("-")[0]
            if writer.isdigit() and not _lives(int(writer)):
                path.unlink(missing_ok=True)
                removed += 1
    return removed


def remove_all_leftovers(root: Path) -> int:
    """Removes every temporary file of a tree that this process uses alone."""
    found = [path for path in root.rglob(f"{TEMPORARY_PREFIX}*") if path.is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True
