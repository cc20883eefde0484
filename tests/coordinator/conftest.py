from collections.abc import Iterator
from pathlib import Path

import pytest

from support.swarm import Swarm, running, small_config


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with running(tmp_path, small_config()) as swarm:
        yield swarm
