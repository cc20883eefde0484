"""What a contributor sees of a key: credit, verdicts in words, trust and what raises it, current leases. Reads only.

Everybody may open it, so it shows no slot (two keys with one slot would show a backup lease), no draw of an audit and no
measurement. The number of clean audits is shown only where every submission is audited anyway.
"""

import itertools
import json
import math
from dataclasses import dataclass
from functools import cached_property

from shoal.coordinator.rules.runs import RunClock
from shoal.coordinator.run import Run
from shoal.coordinator.states import LeaseState
from shoal.coordinator.store import meta
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import query, select
from shoal.coordinator.store.tables import LeaseRow, WorkerRow
from shoal.coordinator.views import worker_view
from shoal.coordinator.workers import find_worker
from shoal.errors import RefusedError
from shoal.protocol.page_views import ContributorView, LeaseView, SubmissionView, WorkersView
from shoal.protocol.verdicts import REASONS, Reason, Severity, severity

SUBMISSIONS = 500
SHOWN = 40
SHOWN_WORKERS = 2000
TRUST = {
    "registered": "Registered. This key has not asked for work yet.",
    "probation": "On probation: every submission is audited in full. Work counts and earns credit.",
    "active": "Active: trusted by its record. Submissions are audited at random.",
    "suspect": "Suspect: a submission differed from what honest machines give. Everything is audited.",
    "quarantined": "Quarantined: submissions are checked but not used until clean work leads out.",
    "gone": "Gone: no heartbeat lately. It returns to the state that it had earned.",
    "banned": "Banned: a proof of wrong work was found. Held credit is lost.",
}


@dataclass(frozen=True)
class _Submission:
    submission_id: str
    received_at: float
    decided_at: float | None
    state: str
    verdict: str | None
    step: int
    policy_version: int

    @cached_property
    def tokens(self) -> int:
        """Of its accepted groups, whether or not another file fills the slot: that would show who has a backup lease."""
        verdict = json.loads(self.verdict or "{}")
        return sum(int(group["tokens"]) for group in verdict.get("groups", ())) if verdict.get("accepted") else 0


def workers(connection: Connection, run: Run) -> WorkersView:
    """Every worker of the run, up to a bound, those with the most accepted work first."""
    rows = select(connection, WorkerRow, "ORDER BY accepted DESC, registered_at LIMIT ?", (SHOWN_WORKERS,))
    return WorkersView(workers=[worker_view(connection, run, row) for row in rows])


def contributor(connection: Connection, run: Run, key: str) -> ContributorView:
    row = find_worker(connection, key)
    if row is None:
        hint = "A key appears here once its worker has joined."
        raise RefusedError("unknown_worker", "No worker with this key has registered.", hint=hint, status=404)
    clock = meta.run_clock(connection)
    submissions = _submissions(connection, key)
    accepted = sorted((one for one in submissions if one.tokens), key=lambda one: one.decided_at or 0.0)
    return ContributorView(
        worker=worker_view(connection, run, row),
        trust=TRUST[row.state],
        raises=what_raises(row, run),
        leases=_leases(connection, run, key, clock),
        submissions=[_view(one, clock) for one in submissions[:SHOWN]],
        tokens_s=[round(clock.at_s(one.decided_at or 0.0), 1) for one in accepted],
        tokens_total=list(itertools.accumulate(one.tokens for one in accepted)),
        tokens_per_hour=_per_hour(accepted, run.clock()),
        join_command=join_command(run),
    )


def join_command(run: Run) -> str:
    return f"shoal work {run.descriptor.coordinator_url} --run-key {run.descriptor.run_key}"


def what_raises(row: WorkerRow, run: Run) -> str:
    needed = run.config.trust.probation_audits
    if row.state == "banned":
        return "Only the run's owner can lift a ban."
    if row.state == "registered":
        return "Ask for work: `shoal work` does so by itself."
    if row.state == "gone":
        return "Start the worker again; nothing that it had earned is lost."
    if row.state == "active":
        return "Nothing more is needed. Each clean submission keeps the record."
    left = max(1, math.ceil(needed - row.clean_audits))
    if row.state == "probation":
        return f"{left} more clean audit{'s' if left > 1 else ''} make this key active."
    more = max(0, row.anomalies - 1) * needed + left
    return f"About {more} clean audits lead back: each full run of {needed} forgives one anomaly."


def _submissions(connection: Connection, key: str) -> list[_Submission]:
    """Newest first."""
    return query(
        connection,
        _Submission,
        "SELECT submissions.submission_id AS submission_id, received_at, decided_at, submissions.state AS state, verdict,"
        " leases.step AS step, leases.policy_version AS policy_version"
        " FROM submissions JOIN leases USING (lease_id) WHERE submissions.worker=?"
        " ORDER BY received_at DESC LIMIT ?",
        (key, SUBMISSIONS),
    )


def _view(one: _Submission, clock: RunClock) -> SubmissionView:
    outcome, words = in_words(one.state, one.verdict)
    return SubmissionView(
        at_s=round(clock.at_s(one.received_at), 1),
        step=one.step,
        policy_version=one.policy_version,
        outcome=outcome,
        words=words,
        tokens=one.tokens,
    )


def in_words(state: str, verdict: str | None) -> tuple[str, str]:
    """The outcome of a submission, and what it means."""
    if state in ("pending", "claimed"):
        return "waiting", "Waits for a validator."
    if state == "quarantined":
        return "quarantined", "Validators failed on it. This is not held against the key."
    if state == "void":
        return "void", "Not used, because the key was banned meanwhile."
    body = json.loads(verdict or "{}")
    if body.get("accepted"):
        return "accepted", "Accepted."
    known = [Reason(code) for code in body.get("reasons", ()) if code in set(Reason)]
    words = "; ".join(REASONS[reason][1] for reason in known) or "no reason was given"
    is_held = any(severity(reason) is not Severity.FAULT for reason in known)
    return "rejected", f"Rejected: {words}." + ("" if is_held else " This is not held against the key.")


def _leases(connection: Connection, run: Run, key: str, clock: RunClock) -> list[LeaseView]:
    held = select(connection, LeaseRow, f"WHERE worker=? AND state='{LeaseState.LEASED}' ORDER BY expires_at", (key,))
    return [
        LeaseView(
            step=row.step,
            policy_version=row.policy_version,
            since_s=round(clock.at_s(row.issued_at), 1),
            expires_in_s=round(row.expires_at - run.clock(), 1),
        )
        for row in held
    ]


def _per_hour(accepted: list[_Submission], now: float) -> float:
    """Accepted tokens per hour, over the last hour or since the first submission."""
    recent = [one for one in accepted if one.decided_at is not None and one.decided_at >= now - 3600]
    if not recent:
        return 0.0
    span_s = max(60.0, now - min(one.received_at for one in recent))
    return round(sum(one.tokens for one in recent) / span_s * 3600, 1)
