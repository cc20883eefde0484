"""Fixtures that the packages with a tiny run share; their conftest files import them."""

import pytest
import torch

from support.tiny_run import TinyRun, make_tiny_run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("tiny-run"))
