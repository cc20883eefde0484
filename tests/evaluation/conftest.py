from pathlib import Path

import pytest

from support.fixtures import one_thread, tiny_run
from support.tiny_run import save_policy

__all__ = ["one_thread", "tiny_policy", "tiny_run"]


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "model", seed=0)
