"""The summary has the promised fields, and each broken promise is one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.observe import failures, headline, summarise, unused_tools, write_summary
from shoal.protocol.api import HistoryView

from .runs import make_evaluation, make_history, make_status, make_version, make_worker


def good() -> dict[str, Any]:
    return summarise(make_status(), make_history(), ledger_ok=True, wall_s=203.4)


def test_good_run_has_every_field_and_no_failure() -> None:
    summary = good()
    promised = {
        "heldout_start": 0.31, "steps": 40, "wall_s": 203.4, "honest_workers": 3, "honest_rejected": 0, "cheaters": 2,
        "cheaters_banned": 2, "max_staleness": 2, "async_level": 2, "ledger_ok": True,
    }  # fmt: skip
    assert {name: summary[name] for name in promised} == promised
    assert failures(summary) == []


def with_observations(*means: float) -> dict[str, Any]:
    """Of a run whose batches had these observations per episode."""
    versions = [make_version(0)]
    for number, mean in enumerate(means, start=1):
        made = make_version(number)
        versions.append(made.model_copy(update={"report": {**made.report, "observations_mean": mean}}))
    history = make_history().model_copy(update={"versions": versions})
    return summarise(make_status(), history, ledger_ok=True)


def test_tool_calls_are_those_of_the_first_batch_and_of_the_last_ones() -> None:
    summary = with_observations(0.125, 0.5, 0.75, 0.875, 1.0)
    assert summary["tool_calls_per_episode"] == {"start": 0.125, "end": 0.875}
    assert "tool calls per episode 0.12 → 0.88" in headline(summary)
    assert unused_tools(summary) == ""


def test_a_tool_that_is_no_longer_used_is_named() -> None:
    assert unused_tools(with_observations(0.5, 0.25, 0.0, 0.0)) == "Tool calls per episode went from 0.5 to 0.0833."
    assert unused_tools(with_observations(0.0, 0.0)) == "No episode called a tool."
    assert good()["tool_calls_per_episode"] is None
    assert "tool" not in headline(good())


def test_end_is_the_mean_of_the_last_three_evaluations() -> None:
    last = [make_evaluation(version).accuracy for version in (32, 36, 40)]
    assert good()["heldout_end"] == pytest.approx(sum(last) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("measured", "start", "end"),
    [
        ({0: 0.271, 7: 0.6, 14: 0.775}, 0.271, 0.775),
        ({0: 0.2, 4: 0.5}, 0.2, 0.5),
        ({0: 0.1, 14: 0.4, 28: 0.5, 42: 0.6}, 0.1, 0.6),
        ({0: 0.2, 1: 0.9}, 0.2, 0.9),
        ({4: 0.5, 0: 0.2}, 0.2, 0.5),
        ({0: 0.3}, 0.3, None),
        ({8: 0.6, 9: 0.8}, None, 0.7),
        ({}, None, None),
    ],
)
def test_the_end_is_measured_on_versions_of_the_end_and_the_start_on_version_0(
    measured: dict[int, float], start: float | None, end: float | None
) -> None:
    rows = [
        make_evaluation(0).model_copy(update={"version": version, "accuracy": accuracy})
        for version, accuracy in measured.items()
    ]
    summary = summarise(make_status(), make_history().model_copy(update={"evaluations": rows}), ledger_ok=True)
    assert (summary["heldout_start"], summary["heldout_end"]) == pytest.approx((start, end))


def test_without_an_accuracy_goal_everything_else_is_still_promised() -> None:
    assert failures(good() | {"heldout_end": 0.1}, end_at_least=None) == []
    (failure,) = failures(good() | {"heldout_end": 0.1, "ledger_ok": False}, end_at_least=None)
    assert "ledger" in failure


def test_each_step_has_reward_phases_and_bytes() -> None:
    rows = good()["per_step"]
    assert [row["step"] for row in rows] == list(range(40))
    assert set(rows[0]["phase_s"]) == {"wait_batch", "fetch", "old_logprobs", "train", "publish"}
    assert rows[0]["bytes"] == 319_000
    assert 0 < rows[0]["reward"] < 1
    assert rows[2]["max_age"] == 2


def test_tasks_and_dropped_groups_are_reported() -> None:
    summary = good()
    assert summary["groups_dropped"] == {"no_signal": 120}
    assert summary["tasks"]["by_solve_rate"] == {"never": 1, "always": 2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heldout_start": 0.5}, "began at 0.5, above 0.35"),
        ({"heldout_end": 0.8}, "ended at 0.8, below 0.9"),
        ({"heldout_start": None, "heldout_end": None}, "never evaluated"),
        ({"heldout_end": None}, "No trained version was evaluated"),
        ({"cheaters_banned": 1}, "1 of 2 cheaters not banned"),
        ({"honest_rejected": 1}, "1 submission of honest workers rejected"),
        ({"max_staleness": 3}, "3 versions old; 2 is the limit"),
        ({"ledger_ok": False}, "ledger does not verify"),
        ({"steps": 12}, "Only 12 of 40 steps"),
    ],
)
def test_each_broken_promise_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    (failure,) = failures(good() | change)
    assert sentence in failure


def test_thresholds_can_be_set() -> None:
    assert len(failures(good(), start_at_most=0.1, end_at_least=0.99)) == 2


def test_cheater_that_never_joined_counts_as_not_banned() -> None:
    summary = summarise(
        make_status(), make_history(), ledger_ok=True, started_cheaters=["cheater-stale", "cheater-late"]
    )
    assert (summary["cheaters"], summary["cheaters_banned"]) == (3, 2)


def test_honest_worker_that_was_banned_is_a_failure() -> None:
    workers = [*make_status().workers, make_worker(9, "honest-9", state="banned", rejected=1)]
    summary = summarise(make_status(workers=workers), make_history(), ledger_ok=True)
    assert summary["honest_rejected"] == 1


def test_run_that_did_nothing_can_be_summarised(tmp_path: Path) -> None:
    nothing = HistoryView(versions=[], evaluations=[], batches=[], bans=[])
    status = make_status(0, workers=[]).model_copy(update={"newest_version": -1, "age_histogram": {}, "relays": []})
    summary = summarise(status, nothing, ledger_ok=True)
    assert (summary["steps"], summary["max_staleness"], summary["heldout_end"]) == (0, 0, None)
    assert "–" in headline(summary)


def test_numbers_that_are_not_finite_do_not_break_the_file(tmp_path: Path) -> None:
    broken = make_version(1).model_copy(update={"report": {"reward_mean": float("nan"), "time_train_s": float("inf")}})
    history = make_history().model_copy(update={"versions": [broken]})
    write_summary(tmp_path / "summary.json", summarise(make_status(), history, ledger_ok=True))
    (row,) = json.loads((tmp_path / "summary.json").read_text())["per_step"]
    assert (row["reward"], row["phase_s"]) == (None, {})
