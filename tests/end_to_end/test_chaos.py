"""A whole swarm under a hundred kills and a bad network keeps every promise."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from end_to_end.chaos import WEIGHTS, Outcome, Plan, run_chaos
from end_to_end.damage import DAMAGES
from end_to_end.invariants import violations
from shoal.rundir import RunDirectory

pytestmark = pytest.mark.slow
FAULTS = ("lost_request", "lost_answer", "doubled", "delayed", "cut_answer")


def test_a_hundred_kills_and_a_bad_network_break_no_promise(tmp_path: Path) -> None:
    outcome = run_chaos(tmp_path / "swarm", Plan(), print)
    assert violations(outcome) == []
    assert outcome.kills == 100
    assert set(outcome.killed) == set(WEIGHTS), "every role was killed"
    assert outcome.last_version - outcome.first_version >= outcome.plan.steps // 2, (
        "the swarm worked while it was killed"
    )
    assert min(outcome.faults[fault] for fault in FAULTS) > 0
    check_that_damage_is_found(outcome, tmp_path / "damaged")


def check_that_damage_is_found(outcome: Outcome, place: Path) -> None:
    """The same checks, on the same remains with one thing wrong in them."""
    large = shutil.ignore_patterns("cache", "shards", "versions", "checkpoints")
    for number, (words, damage) in enumerate(DAMAGES):
        root = place / str(number)
        shutil.copytree(outcome.directory.root.parent, root, ignore=large)
        damage(root)
        damaged = replace(outcome, directory=RunDirectory(root / "run"), temporary=root / "tmp")
        found = violations(damaged, repeat_training="recorded batches" in words)
        assert any(words in sentence for sentence in found), f"{words!r} is not among {found}"
