"""A whole swarm under a hundred kills and a bad network keeps every promise."""

from pathlib import Path

import pytest

from end_to_end.chaos import WEIGHTS, Plan, run_chaos
from end_to_end.invariants import violations

pytestmark = pytest.mark.slow


def test_a_hundred_kills_and_a_bad_network_break_no_promise(tmp_path: Path) -> None:
    outcome = run_chaos(tmp_path, Plan(), print)
    assert violations(outcome) == []
    assert outcome.kills == 100
    assert set(outcome.killed) == set(WEIGHTS), "every role was killed"
    assert outcome.last_version - outcome.first_version >= outcome.plan.steps // 2, (
        "the swarm worked while it was killed"
    )
    assert (
        min(outcome.faults[fault] for fault in ("lost_request", "lost_answer", "doubled", "delayed", "cut_answer")) > 0
    )
