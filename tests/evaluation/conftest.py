from pathlib import Path

import pytest

from worker.tiny_run import save_policy


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "model", seed=0)
