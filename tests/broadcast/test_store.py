"""What an earlier process left is used only after it was hashed, also when several look at it at the same time."""

import errno
from pathlib import Path

import pytest

from shoal.broadcast.store import ShardStore


@pytest.fixture
def left(tmp_path: Path) -> tuple[Path, str, str]:
    """A directory with a right and a damaged shard, and their digests."""
    store = ShardStore(tmp_path)
    right, damaged = store.put("shards", b"right"), store.put("shards", b"soon wrong")
    store.path("shards", damaged).write_bytes(b"wrong")
    return tmp_path, right, damaged


def test_what_is_found_counts_after_it_was_hashed(left: tuple[Path, str, str]) -> None:
    root, right, damaged = left
    store = ShardStore(root)
    heard: list[str] = []
    store.listeners.append(heard.append)
    assert not store.has("shards", right)
    assert store.held("shards") == {right, damaged}
    assert [store.recover("shards", digest) for digest in (right, damaged, "a" * 64)] == [True, False, False]
    assert store.has("shards", right)
    assert store.held("shards") == {right}
    assert heard == [right]


def test_a_damaged_file_that_is_replaced_while_it_is_looked_at_stays(
    left: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, damaged = left
    store = ShardStore(root)

    def replaced_meanwhile(folder: str, digest: str) -> bool:
        store.put("shards", b"soon wrong", digest)
        return False

    monkeypatch.setattr(store, "_matches", replaced_meanwhile)
    assert store.recover("shards", damaged)
    assert store.read("shards", damaged) == b"soon wrong"


def test_a_damaged_file_that_cannot_be_removed_counts_no_more(
    left: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that has turned read-only, say."""
    root, right, damaged = left
    store = ShardStore(root)

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert [store.recover("shards", digest) for digest in (right, damaged, damaged)] == [True, False, False]
    assert store.held("shards") == {right}


def test_a_damaged_file_is_written_again(left: tuple[Path, str, str]) -> None:
    root, _, damaged = left
    store = ShardStore(root)
    assert store.put("shards", b"soon wrong") == damaged
    assert store.read("shards", damaged) == b"soon wrong"
    assert store.has("shards", damaged)
