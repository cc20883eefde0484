"""What the contributor sees: one line per submission, every change of trust state, and the reason for a wait that lasts.

`activity` is the one place that says what the worker does now; heartbeats carry it to the coordinator.
"""

import time
from collections.abc import Callable, Sequence

from shoal.metrics import Report
from shoal.protocol import api

PATIENCE_S = 5.0
TRUST_STATES = {
    "registered": "the coordinator knows this key; its first request for work begins the probation",
    "probation": "every submission is audited until enough of them were clean",
    "active": "only a sample of the groups is audited from now on",
    "suspect": "an audit found something odd; clean work repairs it",
    "quarantined": "work is audited but not used; clean work ends this",
    "gone": "the coordinator had not heard from this worker",
}
WAITS = {
    "need_weights": "fetching version {version}",
    "waiting_for_trainer": "waiting for the trainer",
    "paused": "the run is paused",
    "draining": "the run is being drained, there is no new work",
    "disk_full": "the coordinator's disk is full, waiting for its owner",
    "deliveries": "waiting for uploads",
}


def leaving_line(held: Sequence[str], uploads: int) -> str:
    """What becomes of held slots and of uploads on their way."""
    goes = "goes" if len(held) == 1 else "go"
    slots = f"{', '.join(held)} {goes} to another worker" if held else "no slot is held"
    last = "the last upload is" if uploads == 1 else f"{uploads} uploads are"
    return f"leaving: {slots}{f', {last} being finished' if uploads else ''}"


class WorkerConsole:
    def __init__(
        self,
        report: Report,
        *,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.activity = "joining"
        self.account: api.WorkerView | None = None
        self._report, self._clock, self._patience_s = report, clock, patience_s
        self._waiting_for = ""
        self._waiting_since = 0.0
        self._reported = False

    def submitted(self, lease: api.Lease, samples: int, tokens: int, tokens_per_s: float) -> None:
        """`tokens_per_s` is that of the engine, which works on several slots at a time."""
        self._waiting_for = ""
        line = (
            f"step {lease.step} slot {lease.slot}: {samples} samples, {tokens:,} tokens "
            f"at {tokens_per_s:,.0f}/s, submitted"
        )
        self._report(f"{line}; {self.credit(self.account)}" if self.account else line)

    def working(self, activity: str) -> None:
        self.activity = activity

    def without_work(self, reason: str, version: int) -> None:
        self.waiting(WAITS.get(reason, "waiting for work").format(version=version))

    def waiting(self, what: str) -> None:
        """Reported once, when it has lasted: short waits are part of every step."""
        self.activity = what
        if what != self._waiting_for:
            self._waiting_for, self._waiting_since, self._reported = what, self._clock(), False
        elif not self._reported and self._clock() - self._waiting_since >= self._patience_s:
            self._reported = True
            self._report(what)

    def update_account(self, account: api.WorkerView) -> None:
        """Takes the coordinator's view of this worker and reports what changed."""
        before, self.account = self.account, account
        if before is None:
            return
        if account.state != before.state:
            self._report(f"now {account.state}: {TRUST_STATES.get(account.state, account.reason)}")
        rejected = account.submissions_rejected - before.submissions_rejected
        if rejected > 0:
            self._report(
                f"{rejected} submission{'s' if rejected > 1 else ''} rejected, {account.reason or 'see the run'}"
            )

    def summary(self, submissions: int, tokens: int) -> None:
        credit = f"; {self.credit(self.account)}" if self.account else ""
        self._report(
            f"{submissions} submission{'s' if submissions != 1 else ''} with {tokens:,} tokens this time{credit}"
        )

    @staticmethod
    def credit(account: api.WorkerView) -> str:
        return (
            f"{account.submissions_accepted} accepted so far, "
            f"credit {account.credit_held:,} held, {account.credit_released:,} released"
        )
