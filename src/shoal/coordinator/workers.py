"""Who works: registration, presence, and the record that trust is computed from. Runs inside one transaction of the store."""

from shoal.coordinator import ledger
from shoal.coordinator.context import Context
from shoal.coordinator.rules import trust
from shoal.coordinator.store.database import Connection, Row
from shoal.errors import RefusedError
from shoal.protocol import api


def require_worker(connection: Connection, key: str) -> Row:
    row: Row | None = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if row is None:
        raise RefusedError("unknown_worker", "This key is not registered.", hint="Register first.", status=403)
    if row["state"] == "banned":
        hint = "The ledger holds the verdict; the run's owner can lift a ban."
        raise RefusedError("banned", f"This key is banned: {row['reason']}.", hint=hint, status=403, permanent=True)
    return row


def register(connection: Connection, context: Context, key: str, body: api.RegisterBody) -> None:
    if body.numerics_class not in context.descriptor.numerics_classes:
        known = ", ".join(context.descriptor.numerics_classes)
        raise RefusedError(
            "numerics_class",
            f"This run cannot judge work of the numerics class {body.numerics_class}.",
            hint=f"It accepts {known}; the owner can admit another class by calibrating it.",
            status=422,
            permanent=True,
        )
    if context.role_keys.get(key):
        hint = "Use another key file."
        raise RefusedError("role_key", "A key of the owner's roles cannot work.", hint=hint, status=403, permanent=True)
    needed_s = context.slot_tokens / body.tokens_per_s
    if needed_s > context.config.coordinator.lease_s:
        raise RefusedError(
            "too_slow",
            f"At {body.tokens_per_s:.0f} tokens/s a slot takes up to {needed_s:.0f} s; "
            f"leases of this run last {context.config.coordinator.lease_s} s.",
            hint="Join from a faster machine, or a run with smaller slots.",
            status=422,
            permanent=True,
        )
    now = context.clock()
    row = connection.execute("SELECT * FROM workers WHERE key=?", (key,)).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO workers (key, name, numerics_class, tokens_per_s, memory_bytes, link_bytes_per_s,"
            " registered_at, state) VALUES (?,?,?,?,?,?,?,'registered')",
            (key, *_facts(body), now),
        )
        ledger.append(connection, context.keypair, now, "registered", worker=key, numerics_class=body.numerics_class)
    else:
        require_worker(connection, key)
        connection.execute(
            "UPDATE workers SET name=?, numerics_class=?, tokens_per_s=?, memory_bytes=?, link_bytes_per_s=?"
            " WHERE key=?",
            (*_facts(body), key),
        )
    mark_seen(connection, context, key)


def _facts(body: api.RegisterBody) -> tuple[object, ...]:
    return body.name, body.numerics_class, body.tokens_per_s, body.memory_bytes, body.link_bytes_per_s


def mark_seen(connection: Connection, context: Context, key: str) -> Row:
    """Notes that the key lives; one that was given up returns to the state that it had earned."""
    row = require_worker(connection, key)
    context.seen(key)
    return _move(connection, context, row, "returned") if row["state"] == "gone" else row


def asks_for_work(connection: Connection, context: Context, key: str) -> Row:
    """As above, and a key that had only registered begins its probation."""
    row = mark_seen(connection, context, key)
    return _move(connection, context, row, "asked") if row["state"] == "registered" else row


def _move(connection: Connection, context: Context, row: Row, event: trust.TrustEvent) -> Row:
    save_trust(connection, row["key"], trust.after(trust_record(row), event, context.config.trust))
    return require_worker(connection, row["key"])


def trust_record(row: Row) -> trust.TrustRecord:
    return trust.TrustRecord(row["state"], row["clean_audits"], row["anomalies"])


def earned_state(context: Context, row: Row) -> api.WorkerState:
    return trust.earned_state(trust_record(row), context.config.trust)


def save_trust(connection: Connection, key: str, record: trust.TrustRecord) -> None:
    connection.execute(
        "UPDATE workers SET state=?, clean_audits=?, anomalies=? WHERE key=?",
        (record.state, record.clean_audits, record.anomalies, key),
    )
