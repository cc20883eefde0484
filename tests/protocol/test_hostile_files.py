"""Ten thousand hostile rollout files: each is refused, or read as another reader reads it, with bounded memory and work."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.protocol.rollouts import read_rollouts
from support.hostile_files import GOOD, LIGHT, LIMITS, WAYS, hostile_file

KINDS = set(pq.read_table(pa.BufferReader(GOOD)).schema.types) - {pa.binary()}
CASES = 10_000
LONGEST_S = 1200
TESTS = Path(__file__).parents[1]


def read_with_little_memory(first: int, stop: int, stride: int) -> dict[str, Any]:
    """What became of these files in a process that cannot take much memory."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-m", "support.hostile_files", str(first), str(stop), str(stride)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def assert_as_arrow_reads_it(number: int) -> None:
    """A file that ours has read holds the same values for another reader, if that one can read it at all."""
    way, data = hostile_file(number)
    rows = read_rollouts(data, LIMITS)[1]
    assert len(rows) <= LIMITS.rows
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError):
        return
    ours = [[row.__dict__[name] for row in rows] for name in table.column_names]
    for column, values in zip(table.itercolumns(), ours, strict=True):
        # Annotations do not count for us: to another reader a number may be a date, and a text bytes.
        if column.type in KINDS:
            assert repr(column.to_pylist()) == repr(values), (number, way)


def assert_harmless(stride: int) -> None:
    outcome = read_with_little_memory(0, CASES, stride)
    assert outcome["refused"] + len(outcome["read"]) == len(range(0, CASES, stride))
    assert outcome["refused"] > len(outcome["read"]) > 0
    assert set(outcome["ways"]) == {way.__name__ for way in WAYS}
    assert (outcome["too_large"], outcome["too_much_work"]) == ([], [])
    for number in outcome["read"]:
        assert_as_arrow_reads_it(number)


def test_hostile_files_of_every_kind_are_refused_or_read_correctly_in_little_memory() -> None:
    assert_harmless(stride=8)


@pytest.mark.slow
def test_ten_thousand_hostile_files_are_refused_or_read_correctly_in_little_memory() -> None:
    assert_harmless(stride=1)


def test_a_number_always_gives_the_same_file() -> None:
    numbers = range(len(GOOD), len(GOOD) + len(LIGHT))
    assert [hostile_file(number) for number in numbers] == [hostile_file(number) for number in numbers]
