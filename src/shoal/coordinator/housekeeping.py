"""Changes that time alone brings about: leases and claims that end, workers that fall silent, retries that are due, old nonces."""

from shoal.coordinator import nonces, presence, slots
from shoal.coordinator.context import Context
from shoal.coordinator.leasing import expire_leases
from shoal.coordinator.rules import trust
from shoal.coordinator.states import LeaseState
from shoal.coordinator.steps import advance
from shoal.coordinator.store.database import Transaction
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import LeaseRow
from shoal.coordinator.submissions import release_claims, release_retries
from shoal.coordinator.workers import find_worker, save_trust, trust_record

ABSENT_STATES = ("gone", "banned")


def maintain(connection: Transaction, context: Context) -> bool:
    """Runs about once a second; true if requests that wait should look again."""
    if context.presence.is_shared:
        presence.exchange(connection, context.presence)
    changes = [
        expire_leases(connection, context),
        _mark_silent_gone(connection, context),
        release_claims(connection, context),
        release_retries(connection, context),
        advance(connection, context),
    ]
    nonces.forget_old(connection, context)
    return any(changes)


def _mark_silent_gone(connection: Transaction, context: Context) -> bool:
    gone = [key for key in context.presence.silent() if _mark_gone(connection, context, key)]
    return bool(gone)


def _mark_gone(connection: Transaction, context: Context, key: str) -> bool:
    """Marks a silent key as gone and drops its leases; true if that was news."""
    connection.on_commit(lambda: context.presence.forget_silent(key))
    worker = find_worker(connection, key)
    if worker is None or worker.state in ABSENT_STATES:
        return False
    save_trust(connection, worker, trust.after(trust_record(worker), "silent", context.config.trust))
    for row in select(connection, LeaseRow, f"WHERE worker=? AND state='{LeaseState.LEASED}'", (key,)):
        slots.drop_lease(connection, row, LeaseState.ABANDONED)
    return True
