"""A share of the machine: some of its cores, and after everybody else."""

import subprocess
import sys

import pytest

from shoal.contributor.priority import chosen_cpus
from shoal.errors import ConfigError


def test_the_last_cores_are_taken_and_no_more_than_there_are() -> None:
    assert chosen_cpus(2, [0, 1, 2, 3]) == [2, 3]
    assert chosen_cpus(1, [5]) == [5]
    with pytest.raises(ConfigError, match="--cpus 3 is more than the 2 of this machine"):
        chosen_cpus(3, [0, 1])


def test_the_process_and_its_children_are_bound() -> None:
    script = (
        "import os, subprocess, sys\n"
        "from shoal.contributor.priority import be_nice, take_cpus\n"
        "take_cpus(1); be_nice(); be_nice()\n"
        "ask = 'import os; print(len(os.sched_getaffinity(0)), os.nice(0))'\n"
        "print(subprocess.run([sys.executable, '-c', ask], capture_output=True, text=True).stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "19"]
