"""How a task set travels: one compressed file, cut into pieces that relays serve like any other shard.

The owner packs a set when the run is made; workers and validators fetch the pieces by digest and map the same table from disk.
Packing and unpacking hold one piece in memory, however large the set is.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from shoal.errors import IntegrityError
from shoal.files import atomic_file
from shoal.protocol.descriptor import FileReference, RunDescriptor
from shoal.tasks.sources import load_tasks
from shoal.tasks.task import TaskSet, TaskSets

PIECE_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
LARGEST_RATIO = 1000
"""Raw bytes per packed byte; repetitive tasks pack well, a bomb packs better."""


def pack(tasks: TaskSet, *, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="shoal-tasks-") as folder:
        path = Path(folder) / "tasks.arrow"
        tasks.save(path)
        yield from _cut(_compressed(path), piece_bytes)


def _compressed(path: Path) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=6).compressobj()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield compressor.compress(block)
    yield compressor.flush()


def _cut(blocks: Iterable[bytes], piece_bytes: int) -> Iterator[bytes]:
    pending = b""
    for block in blocks:
        pending += block
        while len(pending) >= piece_bytes:
            yield pending[:piece_bytes]
            pending = pending[piece_bytes:]
    if pending:
        yield pending


def unpack(pieces: Iterable[bytes], path: Path) -> TaskSet:
    """Writes the set to this path, whole or not at all, and opens it there."""
    with atomic_file(path) as file:
        file.writelines(_decompressed(pieces))
        file.flush()
        TaskSet.open(Path(file.name))
    return TaskSet.open(path)


def find_shard(root: Path, reference: FileReference) -> Path | None:
    """A file of the run in this directory, as the origin serves it or as a worker fetched it."""
    places = [root / "origin" / "shards", root / "cache" / "shards"]
    return next((place / reference.digest for place in places if (place / reference.digest).is_file()), None)


def tasks_of_run(descriptor: RunDescriptor, root: Path | None) -> TaskSets | None:
    """Without a network: those that the owner serves, from their pieces here, or else those that the source gives."""
    if not descriptor.task_files:
        return load_tasks(descriptor.tasks)
    shards = [find_shard(root, reference) for reference in descriptor.task_files] if root is not None else [None]
    pieces = (shard.read_bytes() for shard in shards if shard is not None)
    if not all(shards):
        return None
    with tempfile.TemporaryDirectory(prefix="shoal-tasks-") as folder:
        # Mapped pages outlive the file's name.
        return TaskSets(train=unpack(pieces, Path(folder) / "tasks.arrow"), heldout=TaskSet())


def _decompressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    packed = raw = 0
    for piece in pieces:
        for start in range(0, len(piece), BLOCK_BYTES // LARGEST_RATIO):
            part = piece[start : start + BLOCK_BYTES // LARGEST_RATIO]
            try:
                block = decompressor.decompress(part)
            except zstandard.ZstdError as error:
                raise IntegrityError(f"The task set is not packed as it should be: {error}.") from None
            packed, raw = packed + len(part), raw + len(block)
            if raw > LARGEST_RATIO * packed + BLOCK_BYTES:
                raise IntegrityError(f"The task set unpacks to more than {LARGEST_RATIO} times its size.")
            yield block
