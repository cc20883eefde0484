"""`advance` on made-up stores: what it writes is what `rules.batches.decide` decided, whatever the store holds."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator import ledger
from shoal.coordinator.batching.steps import advance, current_step, step_counts
from shoal.coordinator.presence import Presence
from shoal.coordinator.rules import batches
from shoal.coordinator.run import Run
from shoal.coordinator.states import GroupState, LeaseState, SlotState
from shoal.coordinator.store.database import Connection
from shoal.coordinator.store.rows import find, insert, select
from shoal.coordinator.store.schema import FIRST
from shoal.coordinator.store.tables import BatchRow, GroupRow, LeaseRow, SlotRow
from shoal.coordinator.work import slots
from support.samples import RUN_SECRET, descriptor, keypair
from support.swarm import small_config

STEP, PER_SLOT = 4, 2
CONFIG = small_config(run={"steps": 9}, training={"groups_per_step": 3, "async_level": 1, "oversampling": 4.0})


@dataclass(frozen=True)
class MadeSlot:
    """A slot of the current step, or of the one before: where it stands, and which of its groups are useful."""

    is_old: bool
    state: SlotState
    dropped_before: bool
    version: int
    useful: tuple[bool, bool]
    deferred: bool = False


made_slots = st.builds(
    MadeSlot,
    st.booleans(),
    st.sampled_from([SlotState.LEASED, SlotState.SUBMITTED, SlotState.RESOLVED, SlotState.OPEN]),
    st.booleans(),
    st.integers(STEP - 2, STEP),
    st.tuples(st.booleans(), st.booleans()),
    st.booleans(),
)


@contextmanager
def empty_store() -> Iterator[Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.executescript(FIRST)
    insert(connection, *(BatchRow(step, 0.0, 0, 0, "{}", "{}") for step in range(STEP)))
    yield connection
    connection.close()


def run() -> Run:
    return Run(
        config=CONFIG,
        descriptor=descriptor(async_level=1, rollouts=CONFIG.rollouts),
        keypair=keypair("coordinator"),
        secret=RUN_SECRET,
        role_keys={},
        submissions=Path("nowhere"),
        presence=Presence(lambda: 7.0, 30.0),
        clock=lambda: 7.0,
    )


def fill(connection: Connection, number: int, made: MadeSlot) -> None:
    """Brings a slot to its state along the machine, as requests would."""
    step = STEP - 1 if made.is_old else STEP
    for attempt in range(1 + made.dropped_before):
        lease = LeaseRow(
            f"{number}-{attempt}", "r", f"w{number}-{attempt}", step, number, made.version, "", 0.0, 9.0,
            LeaseState.LEASED, by_active_key=bool(number % 2),
        )  # fmt: skip
        slots.take_slot(connection, lease, slots.Terms("class", made.deferred, 5.0))
        insert(connection, lease)
        if attempt == 0 and made.dropped_before:
            slots.drop_lease(connection, lease, LeaseState.EXPIRED)
    if made.state is SlotState.OPEN:
        slots.drop_lease(connection, lease, LeaseState.RETURNED)
    if made.state in (SlotState.SUBMITTED, SlotState.RESOLVED):
        lease = slots.move_lease(connection, lease, LeaseState.SUBMITTED)
        slots.submit_slot(connection, lease)
    if made.state is SlotState.RESOLVED:
        assert slots.resolve_slot(connection, lease) is not None
        groups = [group_row(lease, index, useful, made.deferred) for index, useful in enumerate(made.useful)]
        slots.add_groups(connection, groups)


def group_row(lease: LeaseRow, number: int, useful: bool, deferred: bool) -> GroupRow:
    return GroupRow(
        f"{lease.step}/{lease.slot}/{number}", "s", lease.worker, lease.step, lease.slot, number, lease.policy_version,
        useful, 5, "[]", "[]", True, GroupState.ACCEPTED if useful else GroupState.NO_SIGNAL,
        deferred,
    )  # fmt: skip


def expected(made: list[MadeSlot]) -> batches.Batch | None:
    """The rule, asked without a database."""
    resolved = [(number, slot) for number, slot in enumerate(made) if slot.state is SlotState.RESOLVED]
    waiting = [
        batches.GroupView(step, number, index, f"{step}/{number}/{index}", slot.version, slot.deferred)
        for number, slot in resolved
        for step in [STEP - 1 if slot.is_old else STEP]
        for index, useful in enumerate(slot.useful)
        if useful
    ]
    young = [
        group for group in waiting if group.policy_version >= STEP - 1 and not (group.deferred and group.step == STEP)
    ]
    current = [(number, slot) for number, slot in enumerate(made) if not slot.is_old and not slot.deferred]
    busy = [(number, slot) for number, slot in current if slot.state in (SlotState.LEASED, SlotState.SUBMITTED)]
    counts = batches.StepCounts(
        useful=len(young),
        useful_of_step=sum(group.step == STEP for group in young),
        outstanding_groups=PER_SLOT * len(busy),
        resolved_groups=PER_SLOT * sum(slot.state is SlotState.RESOLVED for _, slot in current),
    )
    blocking = [number for number, slot in busy]
    return batches.decide(batches.StepView(STEP, counts, waiting, blocking), CONFIG.training, CONFIG.trust)


@settings(max_examples=150, deadline=None)
@given(st.lists(made_slots, max_size=12))
def test_what_is_written_is_what_the_rule_decides(made: list[MadeSlot]) -> None:
    with empty_store() as connection:
        for number, slot in enumerate(made):
            fill(connection, number, slot)
        before = {row.group_id: row for row in select(connection, GroupRow)}
        batch = expected(made)
        assert advance(connection, run()) == (batch is not None)
        after = {row.group_id: row for row in select(connection, GroupRow)}
        if batch is None:
            assert (after, current_step(connection)) == (before, STEP)
            return
        consumed = sorted(
            (row for row in after.values() if row.state is GroupState.PROPOSED), key=lambda row: row.position or 0
        )
        assert [row.group_id for row in consumed] == [group.group_id for group in batch.groups]
        assert [row.position for row in consumed] == list(range(len(consumed)))
        assert {row.batch_step for row in consumed} <= {STEP}
        expired = {row.group_id for row in after.values() if row.state is GroupState.EXPIRED}
        assert expired == {group.group_id for group in batch.expired}
        untouched = {name: row for name, row in after.items() if name not in expired and row not in consumed}
        assert untouched == {name: before[name] for name in untouched}
        assert_recorded(connection, batch)


def assert_recorded(connection: Connection, batch: batches.Batch) -> None:
    """The proposal, its ages, closed slots and the counts of the next step."""
    row = find(connection, BatchRow, "WHERE step=?", (STEP,))
    assert row is not None
    assert row.groups == len(batch.groups) == sum(json.loads(row.ages).values())
    assert json.loads(row.dropped).get("expired", 0) == len(batch.expired)
    assert not select(connection, SlotRow, f"WHERE step=? AND state='{SlotState.OPEN}'", (STEP,))
    kinds = [entry.kind for entry in select(connection, ledger.Entry)]
    assert set(kinds) <= {"commitment"}, "a proposal may still change"
    waiting = select(connection, GroupRow, f"WHERE state='{GroupState.ACCEPTED}'")
    young = [group for group in waiting if group.policy_version >= STEP]
    assert current_step(connection) == STEP + 1
    assert step_counts(connection, run(), STEP + 1).useful == len(young)


def test_a_finished_run_forms_no_batch() -> None:
    with empty_store() as connection:
        insert(connection, *(BatchRow(step, 0.0, 0, 0, "{}", "{}") for step in range(STEP, 9)))
        fill(connection, 0, MadeSlot(False, SlotState.RESOLVED, False, STEP, (True, True)))
        assert not advance(connection, run())
        assert current_step(connection) == 9
