"""Changes that time alone brings about: leases and claims that end, workers that fall silent, retries that are due, old nonces."""

from shoal.coordinator import presence, workers
from shoal.coordinator.batching.steps import advance
from shoal.coordinator.rules import trust
from shoal.coordinator.rules.presence import CLOCK_WINDOW_S
from shoal.coordinator.run import Run
from shoal.coordinator.states import LeaseState
from shoal.coordinator.store import nonces
from shoal.coordinator.store.database import Transaction
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import LeaseRow
from shoal.coordinator.work.deliveries import drop_lease
from shoal.coordinator.work.leasing import expire_leases
from shoal.coordinator.work.submissions import release_claims, release_retries
from shoal.coordinator.workers import find_worker, save_trust, trust_record

ABSENT_STATES = ("gone", "banned")
STRANGERS_KEPT_S = 86_400.0
"""A key that is gone and never held a lease is forgotten after this long; registering again costs it nothing."""


def maintain(connection: Transaction, run: Run) -> bool:
    """Runs about once a second; true if requests that wait should look again."""
    if run.presence.is_shared:
        presence.exchange(connection, run.presence, workers.proven_keys)
    changes = [
        expire_leases(connection, run),
        _mark_silent_gone(connection, run),
        release_claims(connection, run),
        release_retries(connection, run),
        advance(connection, run),
    ]
    nonces.forget_before(connection, _oldest_request(run))
    return any(changes)


def forget_strangers(connection: Transaction, run: Run) -> int:
    return workers.forget_strangers(connection, run.clock() - STRANGERS_KEPT_S)


def _oldest_request(run: Run) -> float:
    """Signed time of the oldest request that any process would still accept."""
    slack_s = presence.CLOCK_SLACK_S if run.presence.is_shared else 0.0
    return run.clock() - CLOCK_WINDOW_S - slack_s


def _mark_silent_gone(connection: Transaction, run: Run) -> bool:
    gone = [key for key in run.presence.silent() if _mark_gone(connection, run, key)]
    return bool(gone)


def _mark_gone(connection: Transaction, run: Run, key: str) -> bool:
    """Marks a silent key as gone and drops its leases; true if that was news."""
    connection.on_commit(lambda: run.presence.forget_silent(key))
    worker = find_worker(connection, key)
    if worker is None or worker.state in ABSENT_STATES:
        return False
    save_trust(connection, worker, trust.after(trust_record(worker), "silent", run.config.trust))
    for row in select(connection, LeaseRow, f"WHERE worker=? AND state='{LeaseState.LEASED}'", (key,)):
        drop_lease(connection, run, row, LeaseState.ABANDONED)
    return True
