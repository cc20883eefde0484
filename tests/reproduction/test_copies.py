"""Copies beside a ledger: one that lacks its last byte is noticed, although its weights can still be read."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.reproduction.copies import _has_all_bytes
from shoal.training.checkpoints import accept_one_process


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    accept_one_process()
    save({"model": torch.ones(8), "optimiser": torch.ones(64)}, checkpoint_id=tmp_path / "step", no_dist=True)
    return tmp_path / "step"


def test_a_checkpoint_that_was_cut_off_anywhere_lacks_bytes(checkpoint: Path) -> None:
    assert _has_all_bytes(checkpoint)
    (part,) = checkpoint.glob("*.distcp")
    os.truncate(part, part.stat().st_size - 1)
    assert not _has_all_bytes(checkpoint)
    part.unlink()
    assert not _has_all_bytes(checkpoint)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04N."])
def test_a_checkpoint_whose_list_cannot_be_read_lacks_bytes(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    assert not _has_all_bytes(checkpoint)
