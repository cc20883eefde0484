"""Nonces: a signed request counts once.

A replayed request carries its signed time again, so nonces are kept in the order of time: new ones go to the end of the table,
and those whose request would be refused for its age are deleted from its beginning.
"""

from shoal.coordinator.context import CLOCK_SLACK_S, Context
from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError


def spend(connection: Connection, key: str, at: float, nonce: str) -> None:
    """Uses a nonce up inside the transaction of the change that it authorises."""
    spent = connection.execute(
        "INSERT INTO nonces (at, key, nonce) SELECT ?,?,? WHERE NOT EXISTS"
        " (SELECT 1 FROM old_nonces WHERE key=? AND nonce=?) ON CONFLICT DO NOTHING",
        (at, key, nonce, key, nonce),
    )
    if not spent.rowcount:
        raise RefusedError("replay", "This request was already seen.", hint="Sign a new one.", status=409)


def forget_old(connection: Connection, context: Context) -> None:
    """Deletes those whose request no process would accept any more."""
    now = context.clock()
    oldest = now - context.config.coordinator.clock_window_s - (CLOCK_SLACK_S if context.is_shared else 0.0)
    connection.execute("DELETE FROM nonces WHERE at < ?", (oldest,))
    connection.execute("DELETE FROM old_nonces WHERE expires_at < ?", (now,))
