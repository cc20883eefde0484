"""A tiny random policy and batches for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.training import Group
from support.tiny_models import save_llama

from .batches import VOCABULARY, make_groups


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), VOCABULARY, num_key_value_heads=1)


@pytest.fixture
def groups() -> Callable[..., list[Group]]:
    return make_groups
