"""Nonces: a signed request counts once.

A replayed request carries its signed time again, so nonces are kept in the order of time: new ones go to the end of the table,
and those whose request would be refused for its age are deleted from its beginning.
"""

from shoal.coordinator.store.database import Connection
from shoal.errors import RefusedError


def spend(connection: Connection, key: str, at: float, nonce: str) -> None:
    """Uses a nonce up inside the transaction of the change that it authorises."""
    spent = connection.execute(
        "INSERT INTO nonces (at, key, nonce) VALUES (?,?,?) ON CONFLICT DO NOTHING", (at, key, nonce)
    )
    if not spent.rowcount:
        raise RefusedError("replay", "This request was already seen.", hint="Sign a new one.", status=409)


def forget_before(connection: Connection, oldest: float) -> None:
    """Deletes those whose request no process would accept any more."""
    connection.execute("DELETE FROM nonces WHERE at < ?", (oldest,))
