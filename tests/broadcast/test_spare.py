"""What a version that is kept no more leaves is written over, except where somebody still reads it."""

import ctypes
import fcntl
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.broadcast import DownloadProgress, Origin, OriginSettings, WeightClient, retention
from shoal.broadcast.retention import is_unused
from shoal.files import WEIGHTS_FILE
from support.tiny_disks import TinyDisk

from .conftest import RUN_KEY, Mirror
from .test_client import weights_of
from .test_delta_versions import new_origin, publish, version_bytes

MakeClient = Callable[..., WeightClient]
MakeMirror = Callable[..., Mirror]
MORE_BYTES = 1 << 20
"""Than any file here has."""
FULL = OriginSettings(shard_bytes=1000, keep_versions=3, grace_s=0, delta_from_bytes=None)

linux = pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="the system does not tell who has a file open")


@pytest.fixture(params=["delta", "full"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Origin:
    return new_origin(tmp_path / "origin") if request.param == "delta" else Origin(tmp_path / "origin", RUN_KEY, FULL)


@pytest.fixture
def client(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> WeightClient:
    return make_client(make_mirror(root=origin.root).url, keep_versions=2)


def fetch(client: WeightClient, origin: Origin, version: int) -> Path:
    path = client.fetch_version(version, publish(origin, version))
    assert weights_of(path) == version_bytes(version)
    return path / WEIGHTS_FILE


def file_number(path: Path) -> int:
    return path.stat().st_ino


@pytest.fixture
def spares(tmp_path: Path) -> bool:
    """Whether the directory of the tests is on a file system whose files are written over."""
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip()
    return kind in {"ext2/ext3", "xfs", "btrfs", "tmpfs", "f2fs"}


@linux
def test_a_version_is_written_over_the_one_that_left(origin: Origin, client: WeightClient, spares: bool) -> None:
    numbers = [file_number(fetch(client, origin, version)) for version in range(8)]
    assert len(set(numbers)) == (3 if spares else 8)
    assert not spares or numbers[3:] == numbers[:-3]


def open_it(path: Path) -> Iterator[Callable[[], bytes]]:
    with open(path, "rb") as file:
        yield lambda: os.pread(file.fileno(), MORE_BYTES, 0)


def map_it(path: Path) -> Iterator[Callable[[], bytes]]:
    """As a tensor that was not copied: the file is closed and its pages are used. Python's own mapping keeps the file open."""
    libc, size_bytes = ctypes.CDLL(None), path.stat().st_size
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with open(path, "rb") as file:
        pages = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    assert pages not in (None, ctypes.c_void_p(-1).value)
    try:
        yield lambda: ctypes.string_at(pages, size_bytes)
    finally:
        libc.munmap(pages, size_bytes)


def link_it(path: Path) -> Iterator[Callable[[], bytes]]:
    other = path.parents[3] / "linked"
    os.link(path, other)
    yield other.read_bytes


@pytest.mark.parametrize("hold", [open_it, map_it, link_it])
def test_a_reader_of_a_version_that_left_keeps_its_bytes(
    hold: Callable[[Path], Iterator[Callable[[], bytes]]], origin: Origin, client: WeightClient
) -> None:
    first = fetch(client, origin, 0)
    before, number = first.read_bytes(), file_number(first)
    for read in hold(first):
        for version in range(1, 5):
            assert file_number(fetch(client, origin, version)) != number
        assert not first.exists()
        assert read() == before


@linux
def test_a_file_is_unused_when_nobody_has_it_open_mapped_or_linked(tmp_path: Path, spares: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    assert is_unused(path) == spares
    with open(path, "r+b"):
        assert not is_unused(path)
    for hold in (open_it, map_it):
        for _ in hold(path):
            assert not is_unused(path)
    assert is_unused(path) == spares
    os.link(path, tmp_path / "linked")
    assert not is_unused(path)
    assert not is_unused(tmp_path / "missing")


@pytest.fixture
def overlay(tiny_disk: TinyDisk) -> Iterator[Path]:
    """The file system that the root of a container is."""
    parts = {name: tiny_disk.root / name for name in ("lowerdir", "upperdir", "workdir", "merged")}
    for part in parts.values():
        part.mkdir()
    options = ",".join(f"{name}={part}" for name, part in parts.items() if name != "merged")
    command = ["mount", "-t", "overlay", "-o", options, "overlay", str(parts["merged"])]
    subprocess.run(command, check=True)
    try:
        yield parts["merged"]
    finally:
        subprocess.run(["umount", "-l", str(parts["merged"])], check=True)


def test_a_mapped_file_in_a_container_is_not_written_over(overlay: Path) -> None:
    """There the system grants a lease of a file that is mapped: the mapping is one of another file below."""
    path = overlay / "file"
    path.write_bytes(b"x" * 8192)
    for _ in map_it(path):
        assert not is_unused(path)
    assert not is_unused(path)


def test_a_file_whose_file_system_the_system_does_not_name_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    monkeypatch.setattr(retention, "_file_system", lambda file: "")
    assert not is_unused(path)


def test_a_system_that_does_not_tell_deletes_what_left(
    origin: Origin, client: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fcntl, "F_SETLEASE", raising=False)
    with ExitStack() as held:
        files = []
        for version in range(6):
            path = fetch(client, origin, version)
            files.append(os.fstat(held.enter_context(open(path, "rb")).fileno()).st_ino)
    assert len(set(files)) == 6


def test_bytes_of_the_old_version_never_count_for_the_new_one(
    tmp_path: Path, make_mirror: MakeMirror, make_client: MakeClient
) -> None:
    """A fetch is stopped half-way, a new process goes on, with a second spare on its disk."""
    origin = Origin(tmp_path / "origin", RUN_KEY, FULL)
    mirror = make_mirror(root=origin.root)

    class StoppedError(Exception):
        pass

    def stop(progress: DownloadProgress) -> None:
        if progress.bytes_done > 5000:
            raise StoppedError

    client = make_client(mirror.url, keep_versions=1)
    for version in range(2):
        fetch(client, origin, version)
    newest = publish(origin, 2)
    with pytest.raises(StoppedError):
        client.fetch_version(2, newest, on_progress=stop)
    spare = client._staging.root / "spare"
    spare.mkdir()
    (spare / WEIGHTS_FILE).write_bytes(b"x" * 30_000)
    mirror.requests.clear()
    again = make_client(mirror.url, keep_versions=1)
    assert weights_of(again.fetch_version(2, newest)) == version_bytes(2)
    assert 0 < len([path for path in mirror.requests if path.startswith("/shards/")]) < 20
    fetch(again, origin, 3)


def test_an_earlier_process_left_the_spare(origin: Origin, make_mirror: MakeMirror, make_client: MakeClient) -> None:
    mirror = make_mirror(root=origin.root)
    for version in range(6):
        fetch(make_client(mirror.url, keep_versions=1), origin, version)


def test_a_base_that_was_used_a_moment_ago_is_kept_no_more(
    origin: Origin, make_mirror: MakeMirror, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan touches the base; the new version came within the same tick or before it by the clock, and both stayed."""
    client, touch = make_client(make_mirror(root=origin.root).url, keep_versions=1), os.utime
    monkeypatch.setattr(os, "utime", lambda path: touch(path, (4e9, 4e9)))
    for version in range(5):
        newest = fetch(client, origin, version).parent
        assert list(client._versions.iterdir()) == [newest]


def test_one_copy_more_than_is_kept_is_on_disk_and_none_beside_a_fetch(origin: Origin, client: WeightClient) -> None:
    for version in range(7):
        most = 0

        def look(progress: DownloadProgress) -> None:
            nonlocal most
            most = max(most, client.held_bytes())

        newest = publish(origin, version)
        client.fetch_version(version, newest, on_progress=look)
        client._trash.close()
        file_bytes = (client._versions / newest / WEIGHTS_FILE).stat().st_blocks * 512
        copies = min(version + 1, 3)
        assert len(list(client._root.rglob(WEIGHTS_FILE))) == copies
        assert most < (copies + 1) * file_bytes
