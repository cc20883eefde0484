"""Slots, leases and waiting groups change state here, and their tallies with them, in one transaction.

A tally is a number that a request would otherwise count rows for: slots of a step by state, slots that keys on probation fill,
groups that wait for a batch. So a lease costs the same in a step of a hundred slots and of a hundred thousand.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.states import FILLING, HOLDING, UNDECIDED, GroupState, LeaseState, SlotState, one_of
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
    deferred: bool
    n: int


@dataclass(frozen=True)
class SlotCounts:
    outstanding: int
    resolved: int
    probation: int
    deferred_outstanding: int
    deferred_resolved: int


@dataclass(frozen=True)
class Terms:
    """What a slot gets with a lease."""

    numerics_class: str
    deferred: bool
    due_at: float


@dataclass(frozen=True)
class _Holder:
    lease_id: str
    state: LeaseState


def slot_counts(connection: Connection, epoch: int, step: int) -> SlotCounts:
    tallies = query(connection, Tally, "SELECT name, n FROM tallies WHERE epoch=? AND step=?", (epoch, step))
    counts = {tally.name: tally.n for tally in tallies}

    def count(*states: SlotState, deferred: bool = False) -> int:
        return sum(counts.get(_tally_name(state, deferred), 0) for state in states)

    return SlotCounts(
        outstanding=count(*FILLING),
        resolved=count(SlotState.RESOLVED),
        probation=counts.get(PROBATION, 0),
        deferred_outstanding=count(*FILLING, deferred=True),
        deferred_resolved=count(SlotState.RESOLVED, deferred=True),
    )


def _tally_name(state: SlotState, deferred: bool) -> str:
    return f"deferred {state}" if deferred else str(state)


def take_slot(connection: Connection, lease: LeaseRow, terms: Terms) -> None:
    """The slot of a new lease: the next of the step, one that another key dropped, or one whose key is late."""
    slot = _find_slot(connection, lease)
    changes = Counter({PROBATION: 0 if lease.by_active_key else 1, _tally_name(SlotState.LEASED, terms.deferred): 1})
    if slot is None:
        insert(connection, _first(lease, terms))
    else:
        changes[_tally_name(slot.state, slot.deferred)] -= 1
        _take_again(connection, slot, lease, terms)
    _tally(connection, lease.epoch, lease.step, changes)


def _first(lease: LeaseRow, terms: Terms) -> SlotRow:
    return SlotRow(
        step=lease.step,
        slot=lease.slot,
        state=SlotState.LEASED,
        lease_id=lease.lease_id,
        attempts=1,
        policy_version=lease.policy_version,
        numerics_class=terms.numerics_class,
        deferred=terms.deferred,
        due_at=terms.due_at,
        epoch=lease.epoch,
    )


def _take_again(connection: Connection, slot: SlotRow, lease: LeaseRow, terms: Terms) -> None:
    if slot.state is SlotState.OPEN:
        changed = {"state": SlotState.LEASED, "lease_id": lease.lease_id, "policy_version": lease.policy_version}
        slot = update(connection, slot, **changed, numerics_class=terms.numerics_class, deferred=terms.deferred)
    update(connection, slot, attempts=slot.attempts + 1, due_at=terms.due_at)


def slot_of(connection: Connection, lease: LeaseRow) -> SlotRow:
    slot = _find_slot(connection, lease)
    assert slot is not None, "a lease has a slot"
    return slot


def _find_slot(connection: Connection, lease: LeaseRow) -> SlotRow | None:
    return find(connection, SlotRow, "WHERE epoch=? AND step=? AND slot=?", (lease.epoch, lease.step, lease.slot))


def submit_slot(connection: Connection, lease: LeaseRow) -> None:
    """A file of this lease arrived."""
    slot = slot_of(connection, lease)
    if slot.state is SlotState.LEASED:
        _move(connection, slot, SlotState.SUBMITTED, lease.lease_id)


def resolve_slot(connection: Connection, lease: LeaseRow) -> SlotRow | None:
    """The file of this lease was accepted; returns the slot if the file is its first one, which counts."""
    slot = slot_of(connection, lease)
    if slot.state is not SlotState.SUBMITTED:
        return None
    return _move(connection, slot, SlotState.RESOLVED, lease.lease_id)


def void_slot(connection: Connection, lease: LeaseRow) -> None:
    """The file that counted does not any more."""
    _move(connection, slot_of(connection, lease), SlotState.VOID, lease.lease_id)


def release_slot(connection: Connection, lease: LeaseRow) -> None:
    """This lease no longer fills its slot: another one does, or the slot opens for a different key."""
    slot = slot_of(connection, lease)
    if slot.state not in FILLING:
        return
    others = query(
        connection,
        _Holder,
        "SELECT leases.lease_id AS lease_id, leases.state AS state FROM leases LEFT JOIN submissions USING (lease_id)"
        " WHERE leases.epoch=? AND leases.step=? AND leases.slot=? AND leases.lease_id <> ?"
        f" AND (leases.state='{LeaseState.LEASED}'"
        f" OR leases.state='{LeaseState.SUBMITTED}' AND submissions.state IN {one_of(*UNDECIDED)})"
        " ORDER BY leases.state DESC, leases.issued_at",
        (lease.epoch, lease.step, lease.slot, lease.lease_id),
    )
    if others:
        _move(connection, slot, SlotState(others[0].state), others[0].lease_id)
    else:
        _move(connection, slot, SlotState.OPEN, None)


def _move(connection: Connection, slot: SlotRow, state: SlotState, lease_id: str | None) -> SlotRow:
    if slot.state is state:
        return update(connection, slot, lease_id=lease_id)
    changes = {_tally_name(slot.state, slot.deferred): -1, _tally_name(state, slot.deferred): 1}
    _tally(connection, slot.epoch, slot.step, changes)
    return update(connection, slot, state=state, lease_id=lease_id)


def move_lease(connection: Connection, lease: LeaseRow, state: LeaseState) -> LeaseRow:
    if lease.state in HOLDING and state not in HOLDING and not lease.by_active_key:
        _tally(connection, lease.epoch, lease.step, {PROBATION: -1})
    return update(connection, lease, state=state)


def drop_lease(connection: Connection, lease: LeaseRow, state: LeaseState) -> None:
    """Ends a lease that fills its slot no longer."""
    release_slot(connection, move_lease(connection, lease, state))


def close_step(connection: Connection, epoch: int, step: int) -> None:
    """The open slots of a step whose batch is formed are not needed."""
    for slot in select(connection, SlotRow, f"WHERE epoch=? AND step=? AND state='{SlotState.OPEN}'", (epoch, step)):
        _move(connection, slot, SlotState.CLOSED, None)


def add_groups(connection: Connection, groups: Sequence[GroupRow]) -> None:
    """Groups of an accepted submission; the useful ones wait for a batch."""
    insert(connection, *groups)
    _count_waiting(connection, [group for group in groups if group.state is GroupState.ACCEPTED], 1)


def move_groups(connection: Connection, groups: Sequence[GroupRow], state: GroupState) -> None:
    """Takes waiting groups out of the row."""
    update_all(connection, groups, state=state)
    _count_waiting(connection, groups, -1)


def propose_groups(connection: Connection, groups: Sequence[GroupRow], step: int, first: int = 0) -> None:
    """Puts waiting groups, in this order, into the proposed batch of the step."""
    for position, group in enumerate(groups, start=first):
        update(connection, group, state=GroupState.PROPOSED, batch_step=step, position=position)
    _count_waiting(connection, groups, -1)


def close_gaps(connection: Connection, groups: Sequence[GroupRow]) -> None:
    """Numbers the groups of a batch again after it has lost some."""
    for position, group in enumerate(groups):
        if group.position != position:
            update(connection, group, position=position)


def return_groups(connection: Connection, groups: Sequence[GroupRow]) -> None:
    """Withheld groups whose audit was clean wait again; they are not screened a second time."""
    update_all(connection, groups, state=GroupState.ACCEPTED, logprobs_verified=True)
    _count_waiting(connection, groups, 1)


def withdraw_groups(connection: Connection, groups: Sequence[GroupRow]) -> None:
    """Takes groups out of everything but recorded batches."""
    waiting = [group for group in groups if group.state is GroupState.ACCEPTED]
    move_groups(connection, waiting, GroupState.WITHDRAWN)
    others = [group for group in groups if group.state is not GroupState.ACCEPTED]
    update_all(connection, others, state=GroupState.WITHDRAWN, batch_step=None, position=None)


def waiting_groups(connection: Connection, oldest_version: int, step: int) -> list[Waiting]:
    """Useful groups up to this step that are young enough for its batch, by step."""
    sql = "SELECT step, deferred, n FROM waiting WHERE policy_version >= ? AND step <= ?"
    return query(connection, Waiting, sql, (oldest_version, step))


def _count_waiting(connection: Connection, groups: Sequence[GroupRow], change: int) -> None:
    for names, n in Counter((group.step, group.policy_version, int(group.deferred)) for group in groups).items():
        connection.execute(
            "INSERT INTO waiting (step, policy_version, deferred, n) VALUES (?,?,?,?)"
            " ON CONFLICT (step, policy_version, deferred) DO UPDATE SET n = waiting.n + excluded.n",
            (*names, change * n),
        )
        connection.execute("DELETE FROM waiting WHERE step=? AND policy_version=? AND deferred=? AND n=0", names)


def _tally(connection: Connection, epoch: int, step: int, changes: Mapping[str, int]) -> None:
    changes = {name: change for name, change in changes.items() if change}
    if not changes:
        return
    places = ",".join(["(?,?,?,?)"] * len(changes))
    connection.execute(
        f"INSERT INTO tallies (epoch, step, name, n) VALUES {places}"
        " ON CONFLICT (epoch, step, name) DO UPDATE SET n = tallies.n + excluded.n",
        [value for name, change in changes.items() for value in (epoch, step, str(name), change)],
    )
