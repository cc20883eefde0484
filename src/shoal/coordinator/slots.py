"""Slots, leases and waiting groups change state here, and their tallies with them, in one transaction.

A tally is a number that a request would otherwise count rows for: slots of a step by state, slots that keys on probation fill,
groups that wait for a batch. So a lease costs the same in a step of a hundred slots and of a hundred thousand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.coordinator.store.database import Connection, Row

UNPROVEN = "unproven"
"""Leases of a step that keys on probation hold or have submitted."""
FILLING = ("leased", "submitted")


@dataclass(frozen=True)
class SlotCounts:
    outstanding: int
    judged: int
    unproven: int


def slot_counts(connection: Connection, step: int) -> SlotCounts:
    counts = {row["name"]: row["n"] for row in connection.execute("SELECT name, n FROM tallies WHERE step=?", (step,))}
    outstanding = sum(counts.get(state, 0) for state in FILLING)
    return SlotCounts(outstanding, counts.get("resolved", 0), counts.get(UNPROVEN, 0))


def open_slot(connection: Connection, step: int, key: str) -> int | None:
    """The first slot of the step that was dropped, and not by this key."""
    row = connection.execute(
        "SELECT slot FROM slots WHERE state='open' AND step=? AND NOT EXISTS (SELECT 1 FROM leases"
        " WHERE leases.step=slots.step AND leases.slot=slots.slot AND leases.worker=?) ORDER BY slot LIMIT 1",
        (step, key),
    ).fetchone()
    return None if row is None else int(row["slot"])


def take_open_slot(connection: Connection, step: int, slot: int, lease_id: str, *, proven: bool) -> None:
    connection.execute(
        "UPDATE slots SET state='leased', lease_id=?, attempts=attempts+1 WHERE step=? AND slot=?",
        (lease_id, step, slot),
    )
    _tally(connection, step, {"open": -1, "leased": 1} | _unproven(proven))


def take_new_slot(connection: Connection, step: int, lease_id: str, *, proven: bool) -> int:
    """One more slot at the end of the step's row, leased at once."""
    last = connection.execute("SELECT MAX(slot) AS last FROM slots WHERE step=?", (step,)).fetchone()["last"]
    slot = 0 if last is None else int(last) + 1
    connection.execute("INSERT INTO slots VALUES (?,?,'leased',?,1)", (step, slot, lease_id))
    _tally(connection, step, {"leased": 1} | _unproven(proven))
    return slot


def move_slot(connection: Connection, lease: Row, state: str) -> None:
    """Settles the slot of a lease, if it is still this lease's."""
    step, slot = lease["step"], lease["slot"]
    found = connection.execute(
        "SELECT state FROM slots WHERE step=? AND slot=? AND lease_id=?", (step, slot, lease["lease_id"])
    ).fetchone()
    if found is None or found["state"] == state:
        return
    connection.execute(
        "UPDATE slots SET state=?, lease_id=? WHERE step=? AND slot=?",
        (state, None if state == "open" else lease["lease_id"], step, slot),
    )
    _tally(connection, step, {found["state"]: -1, state: 1})


def end_lease(connection: Connection, lease: Row, state: str) -> None:
    """Ends a lease that was held or submitted."""
    connection.execute("UPDATE leases SET state=? WHERE lease_id=?", (state, lease["lease_id"]))
    if lease["state"] in FILLING and not lease["proven"]:
        _tally(connection, lease["step"], {UNPROVEN: -1})


def drop_lease(connection: Connection, lease: Row, state: str) -> None:
    """Ends a lease; its slot opens for a different key."""
    end_lease(connection, lease, state)
    move_slot(connection, lease, "open")


def close_step(connection: Connection, step: int) -> None:
    """Nobody needs the open slots of a step whose batch is formed."""
    closed = connection.execute("UPDATE slots SET state='closed' WHERE step=? AND state='open'", (step,)).rowcount
    if closed:
        _tally(connection, step, {"open": -closed, "closed": closed})


def count_waiting(connection: Connection, step: int, policy_version: int, change: int) -> None:
    """Notes useful accepted groups that came or left."""
    connection.execute(
        "INSERT INTO waiting VALUES (?,?,?) ON CONFLICT (step, policy_version) DO UPDATE SET n = waiting.n + excluded.n",
        (step, policy_version, change),
    )


def waiting_groups(connection: Connection, step: int, oldest_version: int) -> tuple[int, int]:
    """Useful groups that are young enough for a batch: all of them, and those of this step."""
    rows = connection.execute("SELECT step, n FROM waiting WHERE policy_version >= ?", (oldest_version,)).fetchall()
    return sum(row["n"] for row in rows), sum(row["n"] for row in rows if row["step"] == step)


def mark_groups(connection: Connection, condition: str, values: tuple[object, ...], state: str) -> int:
    """Takes waiting groups out of the row, whatever becomes of them; returns how many."""
    leaving = connection.execute(
        f"SELECT step, policy_version, COUNT(*) AS n FROM groups WHERE state='accepted' AND {condition}"
        " GROUP BY step, policy_version",
        values,
    ).fetchall()
    connection.execute(f"UPDATE groups SET state=? WHERE state='accepted' AND {condition}", (state, *values))
    for row in leaving:
        count_waiting(connection, row["step"], row["policy_version"], -row["n"])
        connection.execute(
            "DELETE FROM waiting WHERE step=? AND policy_version=? AND n=0", (row["step"], row["policy_version"])
        )
    return sum(row["n"] for row in leaving)


def _unproven(proven: bool) -> dict[str, int]:
    return {} if proven else {UNPROVEN: 1}


def _tally(connection: Connection, step: int, changes: Mapping[str, int]) -> None:
    places = ",".join(["(?,?,?)"] * len(changes))
    connection.execute(
        f"INSERT INTO tallies VALUES {places} ON CONFLICT (step, name) DO UPDATE SET n = tallies.n + excluded.n",
        [value for name, change in changes.items() for value in (step, name, change)],
    )
