"""A whole swarm under a hundred kills and a bad network keeps every promise."""

from pathlib import Path

import pytest

from end_to_end.chaos import Plan, run_chaos
from end_to_end.invariants import violations

pytestmark = pytest.mark.slow


def test_a_hundred_kills_and_a_bad_network_break_no_promise(tmp_path: Path) -> None:
    outcome = run_chaos(tmp_path, Plan(), print)
    assert violations(outcome) == []
    assert outcome.kills == 100
    assert {"up", "coordinator", "trainer", "validator", "honest-1", "relay-1"} <= set(outcome.killed)
    assert min(outcome.faults[fault] for fault in ("lost_request", "lost_answer", "doubled", "delayed")) > 0
