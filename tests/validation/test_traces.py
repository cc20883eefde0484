"""What an audit leaves for the owner's page: bounded, finite, and nothing that a verdict depends on."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.errors import UnavailableError
from shoal.policy import TorchEngine
from shoal.policy.engine import Engine, Scored, ScoreRequest
from shoal.protocol import api
from shoal.protocol.page_views import AuditTrace
from shoal.protocol.rollouts import Rollout
from shoal.validation import Validator, load_calibration, traces
from shoal.validation.traces import LARGEST, trace_of
from support.fake_coordinator import FakeCoordinator
from support.samples import keypair
from support.submissions import Submission, submit
from support.tiny_run import TinyRun


def rows(*groups: int, tokens: int = 2) -> list[Rollout]:
    return [
        Rollout("task", group, sample, [1], [5] * tokens, [tokens], [-1.0] * tokens, 0, 0.0, 0.0, 0.0, "stop", [])
        for sample, group in enumerate(groups)
    ]


def scored(*margins: float, count: int = 1) -> list[Scored]:
    values = torch.tensor(margins)
    return [
        Scored(values, torch.zeros(len(margins)), torch.zeros(len(margins), 4), torch.ones(len(margins), 4))
        for _ in range(count)
    ]


class FakeEngine:
    def entropies(self, states: torch.Tensor, *, temperature: float) -> torch.Tensor:
        return torch.full((len(states),), temperature)


def traced(rollouts: Sequence[Rollout], found: Sequence[Scored], engine: object = None) -> AuditTrace:
    return trace_of("0" * 32, rollouts, found, cast(Engine, engine or FakeEngine()), 0.5)


def test_margins_are_of_every_row_and_entropies_of_the_first_group() -> None:
    trace = traced(rows(3, 3, 7), scored(0.0, 0.123456, count=3))
    assert [(row.group, row.sample, row.margins) for row in trace.rows] == [
        (3, 0, [0.0, 0.1235]),
        (3, 1, [0.0, 0.1235]),
        (7, 2, [0.0, 0.1235]),
    ]
    assert [row.entropies for row in trace.rows] == [[0.5, 0.5], [0.5, 0.5], []]


def test_an_engine_without_logits_of_stored_states_gives_no_entropies() -> None:
    (row,) = traced(rows(0), scored(0.0, 0.0), SimpleNamespace()).rows
    assert (row.margins, row.entropies) == ([0.0, 0.0], [])


def test_a_trace_is_bounded_and_ends_with_a_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_TOKENS", 5)
    assert len(traced(rows(0, 0, 0), scored(0.0, 0.0, count=3)).rows) == 2


def test_a_broken_margin_survives_json() -> None:
    trace = traced(rows(0, tokens=3), scored(float("inf"), float("nan"), float("-inf")))
    again = AuditTrace.model_validate_json(trace.model_dump_json())
    assert again.rows[0].margins == [LARGEST, LARGEST, -LARGEST]


def test_an_audit_of_nothing_leaves_an_empty_trace() -> None:
    assert traced([], []).rows == []


def test_entropies_are_those_of_the_policy_at_each_token(tiny_run: TinyRun) -> None:
    engine = tiny_run.new_engine()
    engine.load(tiny_run.policies[0])
    assert isinstance(engine, TorchEngine)
    tokens = (7, 8, 9, 10)
    (row,) = engine.score([ScoreRequest((5, 6), tokens, 3)], temperature=0.7)
    found = engine.entropies(row.states, temperature=0.7)
    with torch.no_grad():
        logits_TV = engine._runner.logits(row.states.to(next(engine._runner.model.parameters()))) / 0.7
        logprobs_TV = logits_TV.double().log_softmax(-1)
        expected = -(logprobs_TV.exp() * logprobs_TV).sum(-1).float()
    torch.testing.assert_close(found, expected)
    assert found.shape == (len(tokens),)
    assert bool((found > 0).all())
    assert bool((engine.entropies(row.states, temperature=100.0) > found).all()), "hotter is less sure"


@pytest.fixture(scope="module")
def honest(tiny_run: TinyRun) -> Submission:
    return submit(tiny_run)


def validator_of(tiny_run: TinyRun, coordinator: FakeCoordinator) -> Validator:
    return Validator(
        tiny_run.joined(tiny_run.weights(0, 1)),
        coordinator.client(keypair("validator")),
        tiny_run.new_engine(),
        load_calibration("bundled"),
    )


def audited(
    validator: Validator, coordinator: FakeCoordinator, submission: Submission
) -> tuple[api.VerdictBody, AuditTrace | None]:
    claim = submission.claim(audit_groups=(0, 1))
    coordinator.files[claim.submission_id] = submission.data
    (check,) = validator.check_all([claim])
    assert check.verdict is not None
    return check.verdict, check.trace


def test_an_audit_of_an_honest_file_traces_every_token(tiny_run: TinyRun, honest: Submission) -> None:
    coordinator = FakeCoordinator()
    validator = validator_of(tiny_run, coordinator)
    verdict, trace = audited(validator, coordinator, honest)
    assert trace is not None
    assert trace.submission_id == verdict.submission_id
    assert [len(row.margins) for row in trace.rows] == [len(one.output_tokens) for one in honest.rollouts]
    assert sum(len(row.margins) for row in trace.rows) == verdict.metrics.tokens
    assert max(max(row.margins) for row in trace.rows) == pytest.approx(verdict.metrics.margin_max, abs=1e-4)
    assert [bool(row.entropies) for row in trace.rows] == [one.group == 0 for one in honest.rollouts]


def test_a_trace_that_cannot_be_made_changes_no_verdict(
    tiny_run: TinyRun, honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> AuditTrace:
        raise RuntimeError("no trace today")

    coordinator = FakeCoordinator()
    validator = validator_of(tiny_run, coordinator)
    monkeypatch.setattr("shoal.validation.validator.trace_of", broken)
    verdict, trace = audited(validator, coordinator, honest)
    assert verdict.accepted
    assert trace is None


def test_a_trace_that_cannot_be_sent_is_counted_and_forgotten(
    tiny_run: TinyRun, honest: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*arguments: Any, **settings: Any) -> None:
        raise UnavailableError("The coordinator is away.")

    coordinator = FakeCoordinator()
    validator = validator_of(tiny_run, coordinator)
    _, trace = audited(validator, coordinator, honest)
    monkeypatch.setattr(validator.client, "send_trace", away)
    validator._send_trace(trace)
    validator._send_trace(None)
    assert validator.metrics.counters["trace_lost"] == 1
