"""A worker's start: one process per directory, no key without a run."""

from pathlib import Path
from typing import Any

import pytest

from roles.conftest import Fail
from shoal.errors import ConfigError, UnavailableError
from shoal.locks import BusyError, hold
from shoal.roles import worker
from support.tiny_run import Reports

URL = "http://coordinator:7300"


def work(root: Path, **options: Any) -> None:
    worker.work(
        URL, Reports(), **({"root": root, "key_file": None, "run_key": None, "name": "", "threads": 0} | options)
    )


def test_two_workers_never_share_a_directory(tmp_path: Path) -> None:
    with hold(tmp_path / "lock", ""), pytest.raises(BusyError, match=r"Another worker uses .* --dir"):
        work(tmp_path)


def test_no_key_is_made_for_a_run_that_cannot_be_reached(fail: Fail, tmp_path: Path) -> None:
    fail(UnavailableError("Nobody there."))
    with pytest.raises(UnavailableError):
        work(tmp_path)
    assert not (tmp_path / "worker.key").exists()


def test_a_cheat_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="Known: stale, rewards"):
        worker._worker_kind("bribes")
