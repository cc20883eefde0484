"""What a trainer leaves about its machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.training.machine import FILE, TrainingMachine


def test_the_facts_of_a_machine_are_written_and_read(tmp_path: Path) -> None:
    here = TrainingMachine.here("cpu")
    here.save(tmp_path)
    assert TrainingMachine.load(tmp_path) == here
    assert replace(here, threads=here.threads + 1) != here
    assert f"{here.threads} threads" in str(here)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"torch": "2"}', b'{"torch": 1, "device": 2, "threads": "x"}'])
def test_something_else_is_no_machine(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    assert TrainingMachine.load(tmp_path) is None
