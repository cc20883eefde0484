"""Slots, leases and waiting groups change state here, and their tallies with them: `coordinator.work.slots` in memory."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from shoal.coordinator.rules import batches
from shoal.coordinator.states import FILLING, HOLDING, LEASE, SLOT, UNDECIDED, LeaseState, SlotState
from shoal.simulation.memory.tables import File, Lease, Slot, StepTables, Tables


def first_slot(tables: Tables, lease: Lease) -> None:
    """The slot of a new lease is the next of its step."""
    step, slot = tables.of_step(lease.step), lease.slot
    tables.revision += 1
    if slot.number == 0:
        step.opened_at = lease.issued_at
    step.slots.append(slot)
    step.tally[slot.state, slot.deferred] += 1
    _hold(step, slot, lease)


def take_again(tables: Tables, slot: Slot, lease: Lease, *, numerics_class: str, deferred: bool, due_at: float) -> None:
    """A slot that another key dropped, or whose key is late."""
    step = tables.of_step(lease.step)
    tables.revision += 1
    if slot.state is SlotState.OPEN:
        del step.open_slots[slot.number]
        step.tally[slot.state, slot.deferred] -= 1
        SLOT.require(slot.state, SlotState.LEASED)
        slot.state, slot.lease, slot.version = SlotState.LEASED, lease, lease.version
        slot.numerics_class, slot.deferred = numerics_class, deferred
        step.tally[slot.state, slot.deferred] += 1
    slot.attempts, slot.due_at = slot.attempts + 1, due_at
    _hold(step, slot, lease)


def _hold(step: StepTables, slot: Slot, lease: Lease) -> None:
    slot.leases.append(lease)
    if not lease.by_active_key:
        step.probation += 1
    lease.key.leased[lease.lease_id] = lease
    lease.key.holding[lease.step] += 1
    _is_late_no_more(step, slot)
    heapq.heappush(step.due, (slot.due_at, slot.number))
    heapq.heappush(step.blocking, slot.number)


def _is_late_no_more(step: StepTables, slot: Slot) -> None:
    due_at = step.late.pop(slot.number, None)
    if due_at is not None:
        del step.overdue[bisect_left(step.overdue, (due_at, slot.number))]


def move_slot(tables: Tables, slot: Slot, state: SlotState, lease: Lease | None) -> None:
    slot.lease = lease
    if slot.state is state:
        return
    SLOT.require(slot.state, state)
    step = tables.of_step(slot.step)
    if slot.state not in FILLING or state not in FILLING:  # no count tells work from its file
        tables.revision += 1
    step.tally[slot.state, slot.deferred] -= 1
    step.tally[state, slot.deferred] += 1
    slot.state = state
    _is_late_no_more(step, slot)
    if state is SlotState.OPEN:
        step.open_slots[slot.number] = slot
    elif state is SlotState.CLOSED:
        step.open_slots.pop(slot.number, None)
    elif state is SlotState.LEASED:
        heapq.heappush(step.due, (slot.due_at, slot.number))


def move_lease(tables: Tables, lease: Lease, state: LeaseState) -> None:
    LEASE.require(lease.state, state)
    if lease.state in HOLDING and state not in HOLDING:
        lease.key.holding[lease.step] -= 1
        tables.revision += 1
        if not lease.by_active_key:
            tables.of_step(lease.step).probation -= 1
    lease.key.leased.pop(lease.lease_id, None)
    tables.leases.pop(lease.lease_id, None)
    lease.state = state


def drop_lease(tables: Tables, lease: Lease, state: LeaseState) -> None:
    """Ends a lease that fills its slot no longer."""
    move_lease(tables, lease, state)
    release_slot(tables, lease)


def release_slot(tables: Tables, lease: Lease) -> None:
    """This lease no longer fills its slot: another one does, or the slot opens for a different key."""
    slot = lease.slot
    if slot.state not in FILLING:
        return
    others = [one for one in slot.leases if one is not lease and _still_fills(one)]
    if others:
        best = min(others, key=lambda one: (one.state is not LeaseState.SUBMITTED, one.issued_at))
        move_slot(tables, slot, SlotState(best.state), best)
    else:
        move_slot(tables, slot, SlotState.OPEN, None)


def _still_fills(lease: Lease) -> bool:
    if lease.state is LeaseState.SUBMITTED:
        return lease.file is not None and lease.file.state in UNDECIDED
    return lease.state is LeaseState.LEASED


def take_apart(step: StepTables) -> None:
    """Slots of a step that is over, unless a key or a validator still works on them: leases and files name each other, and a
    search for such circles in the memory of ten thousand workers takes seconds."""
    for slot in step.slots:
        if not any(lease.state is LeaseState.LEASED or _still_fills(lease) for lease in slot.leases):
            for lease in slot.leases:
                lease.file = None
            slot.lease, slot.leases = None, []


def late_slots(step: StepTables, now: float) -> Iterator[Slot]:
    """Slots that a key works on and whose time is over, the most overdue first, unless enough keys have tried."""
    while step.due and step.due[0][0] <= now:
        due_at, number = heapq.heappop(step.due)
        slot = step.slots[number]
        is_late = slot.due_at == due_at and slot.state is SlotState.LEASED and not slot.deferred
        if is_late and slot.attempts < batches.BLOCKING_ATTEMPTS and number not in step.late:
            step.late[number] = due_at
            insort(step.overdue, (due_at, number))
    return (step.slots[number] for _, number in step.overdue)


def first_blocking(step: StepTables) -> int | None:
    """The first slot that holds back later ones."""
    while step.blocking:
        slot = step.slots[step.blocking[0]]
        if slot.state in FILLING and not slot.deferred and slot.attempts <= batches.BLOCKING_ATTEMPTS:
            return slot.number
        heapq.heappop(step.blocking)
    return None


def ready_groups(tables: Tables, step: int, oldest: int) -> int:
    """Useful groups of earlier steps, and of slots that nothing holds back: no batch has more to choose from."""
    of_step, barrier = tables.of_step(step), first_blocking(tables.of_step(step))
    end = len(of_step.slots) if barrier is None else barrier
    if end < of_step.counted_to:
        of_step.counted_to = of_step.ready = 0
    for slot in of_step.slots[of_step.counted_to : end]:
        of_step.ready += 0 if slot.deferred else slot.useful
    of_step.counted_to = end
    earlier = sum(number for (of, version, _), number in tables.waiting.items() if of < step and version >= oldest)
    return earlier + of_step.ready


def _count(tables: Tables, slot: Slot, change: int) -> None:
    slot.useful += change
    tables.revision += 1
    of_step = tables.steps.get(slot.step)
    if of_step is not None and not slot.deferred and slot.number < of_step.counted_to:
        of_step.ready += change


def add_group(tables: Tables, group: batches.GroupView, file: File) -> None:
    """A useful group of an accepted file waits for a batch."""
    tables.groups[group.group_id] = group
    tables.file_of[group.group_id] = file
    tables.waiting[group.step, group.policy_version, group.deferred] += 1
    file.waiting.add(group.group_id)
    _count(tables, file.lease.slot, 1)
    file.lease.key.waiting_unaudited += not group.audited


def remove_group(tables: Tables, group: batches.GroupView) -> File:
    """It is proposed, expired or withdrawn; returns its file."""
    del tables.groups[group.group_id]
    file = tables.file_of.pop(group.group_id)
    place = (group.step, group.policy_version, group.deferred)
    tables.waiting[place] -= 1
    if not tables.waiting[place]:
        del tables.waiting[place]
    file.waiting.discard(group.group_id)
    _count(tables, file.lease.slot, -1)
    file.lease.key.waiting_unaudited -= not group.audited
    return file
