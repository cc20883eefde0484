"""Changes that time alone brings about: leases and claims that end, workers that fall silent, retries that are due, old nonces."""

from shoal.coordinator import nonces, presence, slots
from shoal.coordinator.context import Context
from shoal.coordinator.leasing import expire_leases
from shoal.coordinator.rules import trust
from shoal.coordinator.steps import advance
from shoal.coordinator.store.database import Connection
from shoal.coordinator.submissions import release_claims
from shoal.coordinator.workers import save_trust, trust_record

LIVE_STATES = ("registered", "probation", "active", "suspect", "quarantined")


def maintain(connection: Connection, context: Context) -> bool:
    """What time alone brings about; true if somebody who waits should look again."""
    if context.is_shared:
        presence.exchange(connection, context)
    changes = [
        sweep(connection, context),
        release_claims(connection, context),
        _retries_due(connection, context),
        advance(connection, context),
    ]
    return any(changes)


def sweep(connection: Connection, context: Context) -> bool:
    """Ends leases that ran out, gives up workers that fell silent, forgets old nonces; true if work came free."""
    expired = expire_leases(connection, context)
    gone = [key for key in context.silent() if _mark_gone(connection, context, key)]
    nonces.forget_old(connection, context)
    return expired or bool(gone)


def _retries_due(connection: Connection, context: Context) -> bool:
    due = connection.execute(
        "UPDATE submissions SET retry_at=0 WHERE state='pending' AND retry_at > 0 AND retry_at <= ?", (context.clock(),)
    )
    return due.rowcount > 0


def _mark_gone(connection: Connection, context: Context, key: str) -> bool:
    """Marks a silent key as gone. It is forgotten one sweep later, when that is surely on disk."""
    worker = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if worker is None or worker["state"] not in LIVE_STATES:
        context.forget(key)
        return False
    save_trust(connection, key, trust.after(trust_record(worker), "silent", context.config.trust))
    for row in connection.execute("SELECT * FROM leases WHERE worker=? AND state='leased'", (key,)).fetchall():
        slots.drop_lease(connection, row, "abandoned")
    return True
