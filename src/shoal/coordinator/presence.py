"""What several coordinator processes on one database tell each other: which workers and relays each of them heard.

Heartbeats live in the memory of the process that got them. Every few seconds it writes down what it heard and reads what others
heard, so that nobody is given up by a process that it never talked to.
"""

from shoal.coordinator.context import CLOCK_SLACK_S, RELAY_MEMORY_S, Context, Presence, RelayPresence
from shoal.coordinator.store.database import Connection
from shoal.protocol import api

EXCHANGES_PER_SILENCE = 6
"""How often presence is exchanged in the time after which a silent worker is given up."""
KEPT_SILENCES = 10


def exchange(connection: Connection, context: Context) -> None:
    now, silence_s = context.clock(), context.config.coordinator.gone_after_s
    if now - context.exchanged_at < silence_s / EXCHANGES_PER_SILENCE:
        return
    _tell_workers(connection, context)
    _hear_workers(connection, context, context.exchanged_at - CLOCK_SLACK_S)
    _tell_relays(connection, context)
    _hear_relays(connection, context, now - RELAY_MEMORY_S)
    connection.execute("DELETE FROM presence WHERE seen_at < ?", (now - KEPT_SILENCES * silence_s,))
    connection.execute("DELETE FROM relays WHERE seen_at < ?", (now - RELAY_MEMORY_S,))
    context.exchanged_at = now


def _tell_workers(connection: Connection, context: Context) -> None:
    heard, context.heard = context.heard, set()
    known = [(key, presence) for key in heard if (presence := context.presence.get(key)) is not None]
    connection.executemany(
        "INSERT INTO presence VALUES (?,?,?,?,?) ON CONFLICT (key) DO UPDATE SET seen_at=excluded.seen_at,"
        " activity=excluded.activity, tokens_generated=excluded.tokens_generated, bytes_received=excluded.bytes_received"
        " WHERE presence.seen_at < excluded.seen_at",
        [(key, one.seen_at, one.activity, one.tokens_generated, one.bytes_received) for key, one in sorted(known)],
    )


def _hear_workers(connection: Connection, context: Context, since: float) -> None:
    for row in connection.execute("SELECT * FROM presence WHERE seen_at > ?", (since,)).fetchall():
        known = context.presence.get(row["key"])
        if known is None or known.seen_at < row["seen_at"]:
            context.presence[row["key"]] = Presence(
                row["seen_at"], row["activity"], row["tokens_generated"], row["bytes_received"]
            )


def _tell_relays(connection: Connection, context: Context) -> None:
    connection.executemany(
        "INSERT INTO relays VALUES (?,?,?) ON CONFLICT (key) DO UPDATE SET seen_at=excluded.seen_at, body=excluded.body"
        " WHERE relays.seen_at < excluded.seen_at",
        [(key, relay.seen_at, relay.body.model_dump_json()) for key, relay in list(context.relays.items())],
    )


def _hear_relays(connection: Connection, context: Context, since: float) -> None:
    for row in connection.execute("SELECT * FROM relays WHERE seen_at > ?", (since,)).fetchall():
        known = context.relays.get(row["key"])
        if known is None or known.seen_at < row["seen_at"]:
            context.relays[row["key"]] = RelayPresence(row["seen_at"], api.RelayBody.model_validate_json(row["body"]))
