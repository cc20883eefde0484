"""Models are saved once per test session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.tiny_models import save_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a named tiny model; another seed is another version of the same architecture."""
    made: dict[tuple[str, int], Path] = {}

    def directory(name: str, seed: int = 0) -> Path:
        if (name, seed) not in made:
            made[name, seed] = save_model(name, tmp_path_factory.mktemp(name), seed=seed)
        return made[name, seed]

    return directory


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
