"""What an audit saw token by token, for the owner's page: margins of every audited row, entropies of the first group.

Free where it can be: margins exist anyway, and entropies of one group cost a small part of an audit. A trace is bounded, is sent
after the verdict, and nothing depends on its arrival.
"""

from collections.abc import Sequence
from typing import Any

from shoal.policy.engine import Engine, Scored
from shoal.protocol.page_views import AuditTrace, TraceRow
from shoal.protocol.rollouts import Rollout

MOST_TOKENS = 100_000
"""Of one trace; about a megabyte."""
DIGITS = 4
LARGEST = 1e9


def trace_of(
    submission_id: str, rollouts: Sequence[Rollout], scored: Sequence[Scored], engine: Engine, temperature: float
) -> AuditTrace:
    rows, tokens = list[TraceRow](), 0
    first = rollouts[0].group if rollouts else 0
    for rollout, row in zip(rollouts, scored, strict=True):
        tokens += len(rollout.output_tokens)
        if tokens > MOST_TOKENS:
            break
        entropies = _entropies(engine, row, temperature) if rollout.group == first else []
        rows.append(
            TraceRow(group=rollout.group, sample=rollout.sample, margins=_rounded(row.margins), entropies=entropies)
        )
    return AuditTrace(submission_id=submission_id, rows=rows)


def _entropies(engine: Engine, row: Scored, temperature: float) -> list[float]:
    """Of the policy at each token; empty for an engine that gives no logits of stored states."""
    measure = getattr(engine, "entropies", None)
    return _rounded(measure(row.states, temperature=temperature)) if measure is not None else []


def _rounded(values: Any) -> list[float]:
    """Numbers that JSON has: a token whose logits are broken loses by an infinite margin."""
    return [round(max(-LARGEST, min(LARGEST, float(value))), DIGITS) for value in values.nan_to_num(LARGEST).tolist()]
