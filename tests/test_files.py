import os
import subprocess
from pathlib import Path

import pytest

from shoal.files import (
    TEMPORARY_PREFIX,
    digest_bytes,
    digest_file,
    is_digest,
    remove_all_leftovers,
    remove_leftovers,
    write_atomic,
)

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_digests_are_blake3_of_bytes_and_files_alike(tmp_path: Path) -> None:
    assert digest_bytes(b"") == EMPTY
    for data in (b"", b"shoal", b"x" * 3_000_000):
        path = tmp_path / "file"
        path.write_bytes(data)
        assert digest_file(path) == digest_bytes(data) == digest_bytes(memoryview(data))


@pytest.mark.parametrize("text", ["", "ab", "AB" * 32, "zz" * 32, "ab" * 32 + "\n", "ab" * 33])
def test_a_digest_has_one_spelling(text: str) -> None:
    assert not is_digest(text)
    assert is_digest("ab" * 32)


def test_a_write_replaces_the_whole_file_and_makes_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_atomic(path, b"first, and longer")
    write_atomic(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_temporary_files_are_hidden_and_beside_their_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    replace = os.replace

    def watch(source: str, target: Path) -> None:
        seen.append(os.listdir(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write_atomic(tmp_path / "file", b"data")
    assert len(seen) == 1
    assert all(name.startswith(TEMPORARY_PREFIX) for name in seen[0])


def dead_pid() -> int:
    return int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout)


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    dead = tmp_path / f"{TEMPORARY_PREFIX}{dead_pid()}-abc"
    living = tmp_path / f"{TEMPORARY_PREFIX}{os.getpid()}-abc"
    others = [tmp_path / f"{TEMPORARY_PREFIX}step-00000004", tmp_path / "file"]
    for path in (dead, living, *others):
        path.write_bytes(b"x")
    assert remove_leftovers(tmp_path, tmp_path / "missing") == 1
    assert {path.name for path in tmp_path.iterdir()} == {living.name, *(path.name for path in others)}


def test_a_tree_of_ones_own_is_cleaned_of_everything_temporary(tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    write_atomic(tmp_path / "deep" / "file", b"kept")
    (tmp_path / "deep" / "down" / f"{TEMPORARY_PREFIX}abc").write_bytes(b"x")
    assert remove_all_leftovers(tmp_path) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
