from pathlib import Path

import pytest
import zstandard

from shoal.config import TasksConfig
from shoal.errors import IntegrityError
from shoal.tasks import TaskSet, load_tasks
from shoal.tasks.datasets.transfer import pack, unpack

TASKS = load_tasks(TasksConfig(count=5000, heldout=1)).train


def test_a_set_survives_the_journey_in_pieces(tmp_path: Path) -> None:
    pieces = list(pack(TASKS, piece_bytes=10_000))
    assert len(pieces) > 3
    assert {len(piece) for piece in pieces[:-1]} == {10_000}
    arrived = unpack(pieces, tmp_path / "tasks.arrow")
    assert arrived.digest == TASKS.digest
    assert arrived[4999] == TASKS[4999]


def test_the_same_set_packs_to_the_same_bytes() -> None:
    assert list(pack(TASKS)) == list(pack(TaskSet(TASKS)))


@pytest.mark.parametrize("bad", [b"nonsense", zstandard.compress(b"no table"), zstandard.compress(bytes(64 << 20))])
def test_anything_else_is_refused_and_leaves_nothing(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(IntegrityError):
        unpack([bad], tmp_path / "tasks.arrow")
    assert list(tmp_path.iterdir()) == []
