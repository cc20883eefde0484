"""Slots, leases and waiting groups change state here, and their tallies with them, in one transaction.

A tally is a number that a request would otherwise count rows for: slots of a step by state, slots that keys on probation fill,
groups that wait for a batch. So a lease costs the same in a step of a hundred slots and of a hundred thousand.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.states import FILLING, HOLDING, GroupState, LeaseState, SlotState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, insert, query, select, update, update_all
from shoal.coordinator.store.tables import GroupRow, LeaseRow, SlotRow

PROBATION = "probation"
"""Leases of a step that keys on probation hold or have submitted."""


@dataclass(frozen=True)
class Tally:
    name: str
    n: int


@dataclass(frozen=True)
class Waiting:
    """Useful accepted groups of one step and version that no batch holds."""

    step: int
    n: int


@dataclass(frozen=True)
class SlotCounts:
    outstanding: int
    resolved: int
    probation: int


def slot_counts(connection: Connection, step: int) -> SlotCounts:
    tallies = query(connection, Tally, "SELECT name, n FROM tallies WHERE step=?", (step,))
    counts = {tally.name: tally.n for tally in tallies}
    outstanding = sum(counts.get(state, 0) for state in FILLING)
    return SlotCounts(outstanding, counts.get(SlotState.RESOLVED, 0), counts.get(PROBATION, 0))


def take_slot(connection: Connection, lease: LeaseRow) -> None:
    """The slot of a new lease: one that another key dropped, or the next of the step."""
    slot = find(connection, SlotRow, "WHERE step=? AND slot=?", (lease.step, lease.slot))
    changes = {SlotState.LEASED.value: 1} | ({} if lease.by_active_key else {PROBATION: 1})
    if slot is None:
        insert(connection, SlotRow(lease.step, lease.slot, SlotState.LEASED, lease.lease_id, attempts=1))
    else:
        update(connection, slot, state=SlotState.LEASED, lease_id=lease.lease_id, attempts=slot.attempts + 1)
        changes[slot.state.value] = -1
    _tally(connection, lease.step, changes)


def move_slot(connection: Connection, lease: LeaseRow, state: SlotState) -> None:
    """Moves the slot of a lease, if it is still this lease's."""
    slot = find(connection, SlotRow, "WHERE step=? AND slot=? AND lease_id=?", (lease.step, lease.slot, lease.lease_id))
    if slot is None or slot.state == state:
        return
    update(connection, slot, state=state, lease_id=None if state is SlotState.OPEN else lease.lease_id)
    _tally(connection, slot.step, {slot.state: -1, state: 1})


def move_lease(connection: Connection, lease: LeaseRow, state: LeaseState) -> LeaseRow:
    if lease.state in HOLDING and state not in HOLDING and not lease.by_active_key:
        _tally(connection, lease.step, {PROBATION: -1})
    return update(connection, lease, state=state)


def drop_lease(connection: Connection, lease: LeaseRow, state: LeaseState) -> None:
    """Ends a lease; its slot opens for a different key."""
    move_slot(connection, move_lease(connection, lease, state), SlotState.OPEN)


def close_step(connection: Connection, step: int) -> None:
    """The open slots of a step whose batch is formed are not needed."""
    closed = select(connection, SlotRow, f"WHERE step=? AND state='{SlotState.OPEN}'", (step,))
    if closed:
        update_all(connection, closed, state=SlotState.CLOSED)
        _tally(connection, step, {SlotState.OPEN: -len(closed), SlotState.CLOSED: len(closed)})


def add_groups(connection: Connection, groups: Sequence[GroupRow]) -> None:
    """Groups of an accepted submission; the useful ones wait for a batch."""
    insert(connection, *groups)
    _count_waiting(connection, [group for group in groups if group.state is GroupState.ACCEPTED], 1)


def move_groups(connection: Connection, groups: Sequence[GroupRow], state: GroupState) -> None:
    """Takes waiting groups out of the row."""
    update_all(connection, groups, state=state)
    _count_waiting(connection, groups, -1)


def consume_groups(connection: Connection, groups: Sequence[GroupRow], step: int) -> None:
    """Puts waiting groups, in this order, into the batch of the step."""
    for position, group in enumerate(groups):
        update(connection, group, state=GroupState.CONSUMED, batch_step=step, position=position)
    _count_waiting(connection, groups, -1)


def waiting_groups(connection: Connection, step: int, oldest_version: int) -> tuple[int, int]:
    """Useful groups that are young enough for a batch: all of them, and those of this step."""
    rows = query(connection, Waiting, "SELECT step, n FROM waiting WHERE policy_version >= ?", (oldest_version,))
    return sum(row.n for row in rows), sum(row.n for row in rows if row.step == step)


def _count_waiting(connection: Connection, groups: Sequence[GroupRow], change: int) -> None:
    for (step, version), n in Counter((group.step, group.policy_version) for group in groups).items():
        connection.execute(
            "INSERT INTO waiting (step, policy_version, n) VALUES (?,?,?)"
            " ON CONFLICT (step, policy_version) DO UPDATE SET n = waiting.n + excluded.n",
            (step, version, change * n),
        )
        connection.execute("DELETE FROM waiting WHERE step=? AND policy_version=? AND n=0", (step, version))


def _tally(connection: Connection, step: int, changes: Mapping[str, int]) -> None:
    places = ",".join(["(?,?,?)"] * len(changes))
    connection.execute(
        f"INSERT INTO tallies (step, name, n) VALUES {places}"
        " ON CONFLICT (step, name) DO UPDATE SET n = tallies.n + excluded.n",
        [value for name, change in changes.items() for value in (step, str(name), change)],
    )
