"""Leases: which slot a key works on, until when, and what happens to slots that are dropped.

Every function runs inside one transaction of the store. `rules.leases` decides; this module reads and writes rows.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from blake3 import blake3

from shoal.coordinator.batching.steps import RunNow, counts_ahead, read_run, step_counts
from shoal.coordinator.batching.timing import StoredPast, timing_view
from shoal.coordinator.rules import backups, batches, deliveries, freshness, leases
from shoal.coordinator.run import Run
from shoal.coordinator.states import HOLDING, LeaseState, SlotState, one_of
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import find, insert, number, query, select
from shoal.coordinator.store.tables import LeaseRow, WorkerRow
from shoal.coordinator.work import slots
from shoal.coordinator.work.deliveries import Observed, drop_lease, observe
from shoal.coordinator.workers import delivery_record, mark_asking, save_deliveries
from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.protocol.steps import StepId, step_secret

PAGE = 16
FIRST_PAGE = 2
"""The key of the newest lease is nearly always present."""


@dataclass(frozen=True)
class _Version:
    version: int
    manifest_digest: str
    published_at: float


@dataclass(frozen=True)
class _Granted:
    slot: leases.Grant
    drawn_by: StepId
    """The step of the slot, whose secret draws it."""
    version: _Version
    pace: deliveries.Pace


@dataclass(frozen=True)
class _KeyCounts:
    held: int
    holding: int


@dataclass(frozen=True)
class _Holder:
    worker: str


KEY_COUNTS = (
    f"SELECT (SELECT COUNT(*) FROM leases WHERE worker=? AND state='{LeaseState.LEASED}') AS held,"
    f" (SELECT COUNT(*) FROM leases WHERE worker=? AND epoch=? AND step=? AND state IN {one_of(*HOLDING)}) AS holding"
)
HAD_IT = (
    "SELECT 1 FROM leases WHERE leases.epoch=slots.epoch AND leases.step=slots.step AND leases.slot=slots.slot"
    " AND leases.worker=?"
)
OPEN_SLOT = (
    f"SELECT slot, policy_version AS version FROM slots WHERE state='{SlotState.OPEN}'"
    " AND epoch=? AND step=? AND deferred >= ?"
    f" AND NOT EXISTS ({HAD_IT}) ORDER BY slot LIMIT 1"
)
LATE_SLOTS = (
    f"SELECT step, slot, policy_version AS version, attempts, due_at FROM slots WHERE state='{SlotState.LEASED}'"
    " AND deferred=0 AND epoch=? AND step=? AND due_at <= ? AND numerics_class=? AND attempts < ?"
    f" AND NOT EXISTS ({HAD_IT}) ORDER BY due_at LIMIT {PAGE}"
)
FAILING = 2
"""A key with this many failures in a row does not count as working."""


def lease(connection: Transaction, run: Run, key: str, body: api.LeaseBody) -> api.LeaseAnswer:
    """As many slots as the worker has room for and may have, or the reason why there is none."""
    expire_leases(connection, run)  # first: the key that asks may have failed with it
    worker = mark_asking(connection, run, key)
    known = _granted_before(connection, key, body)
    now, observed = read_run(connection, run), observe(connection, run)
    if known and known[0].epoch < now.epoch:  # its answer was lost, and a rewind came between
        return api.LeaseAnswer(reason="no_work", wanted_version=max(0, now.newest_version))
    if known:
        return _granted_answer(run, known, known[0].policy_version)
    published, rows, wanted = _published(connection, run, now.step), list[LeaseRow](), 0
    for request_id in _request_ids(body):
        decision = leases.decide(
            _swarm_view(connection, run, worker, now, published, observed),
            _key_view(connection, run, worker, observed, now, set(body.held_versions) & set(published)),
            run.config.training,
            run.config.trust,
        )
        if isinstance(decision, leases.Refused):
            return _granted_answer(run, rows, wanted) if rows else _refused_answer(decision)
        step = now.step_id if decision.step == now.step else now.step_id.next()
        granted = _Granted(decision, step, published[decision.version], observed.pace)
        rows.append(_grant(connection, run, worker, request_id, granted))
        worker = _note_first_use(connection, worker, published[decision.version], rows[-1].issued_at)
        wanted = decision.wanted_version
    return _granted_answer(run, rows, wanted)


def _request_ids(body: api.LeaseBody) -> list[str]:
    """One for each slot that is asked for; no client can make the others."""
    return [body.request_id, *(f"{body.request_id}/{number}" for number in range(1, body.most))]


def _granted_before(connection: Connection, key: str, body: api.LeaseBody) -> list[LeaseRow]:
    """What the same request was granted when it came first."""
    names = _request_ids(body)
    places = ",".join("?" * len(names))
    return select(
        connection, LeaseRow, f"WHERE worker=? AND request_id IN ({places}) ORDER BY request_id", (key, *names)
    )


def _granted_answer(run: Run, rows: Sequence[LeaseRow], wanted_version: int) -> api.LeaseAnswer:
    first, *others = [lease_of(run, row) for row in rows]
    return api.LeaseAnswer(lease=first, beside=others, wanted_version=wanted_version)


def _refused_answer(refused: leases.Refused) -> api.LeaseAnswer:
    wanted, wait_s = refused.wanted_version or 0, refused.retry_after_s
    return api.LeaseAnswer(reason=refused.reason, retry_after_s=wait_s, wanted_version=wanted)


@dataclass(frozen=True)
class Demand:
    """What requests that wait for work look at."""

    step: int
    newest_version: int
    wants_groups: bool
    """Whether the current step needs more groups."""


def demand(connection: Connection, run: Run) -> Demand:
    now, timing = read_run(connection, run), run.timing.decision if run.timing is not None else None
    counts, training = step_counts(connection, run, now.step, now.epoch), run.config.training
    share, has_time = (timing.useful_share, timing.has_time) if timing is not None else (None, False)
    wanted = batches.groups_wanted(counts, training, share, has_time=has_time)
    return Demand(now.step, now.newest_version, wanted > 0)


def _published(connection: Connection, run: Run, step: int) -> dict[int, _Version]:
    """The versions inside the asynchrony window."""
    rows = query(
        connection,
        _Version,
        "SELECT version, manifest_digest, published_at FROM versions WHERE version BETWEEN ? AND ?",
        (step - run.config.training.async_level, step),
    )
    return {row.version: row for row in rows}


def _swarm_view(
    connection: Connection,
    run: Run,
    worker: WorkerRow,
    now: RunNow,
    published: Mapping[int, _Version],
    observed: Observed,
) -> leases.SwarmView:
    timing = _decide_timing(connection, run, now)
    settled_at = run.clock() - observed.pace.grace_s
    others_active = has_other_workers(connection, run, worker.key, active=True)
    return leases.SwarmView(
        run_state=now.state,
        step=now.step,
        steps=run.config.run.steps,
        has_space=run.has_space(),
        published=list(published),
        settled_version=max(
            (one.version for one in published.values() if one.published_at <= settled_at), default=None
        ),
        counts=step_counts(connection, run, now.step, now.epoch),
        next_slot=_next_slot(connection, now.epoch, now.step),
        tasks_per_slot=run.descriptor.rollouts.tasks_per_slot,
        keys_polling=run.presence.polling(has_delivered=worker.delivered_at > 0),
        has_other_workers=others_active or has_other_workers(connection, run, worker.key, active=False),
        has_other_active_workers=others_active,
        awaited_version=timing.oldest_version if timing else 0,
        useful_share=timing.useful_share if timing else None,
        has_time=timing is not None and timing.has_time,
        ahead=_next_step(connection, run, now),
    )


def _next_step(connection: Connection, run: Run, now: RunNow) -> leases.NextStep | None:
    """While the trainer waits for the batch of the current step, so that the next one can get no newer version either."""
    step, training = now.step + 1, run.config.training
    if now.newest_version < now.step or step >= run.config.run.steps or training.async_level < 1:
        return None
    return leases.NextStep(counts_ahead(connection, run, now.step, now.epoch), _next_slot(connection, now.epoch, step))


def _next_slot(connection: Connection, epoch: int, step: int) -> int:
    return number(connection, "SELECT MAX(slot) + 1 AS n FROM slots WHERE epoch=? AND step=?", (epoch, step))


def _decide_timing(connection: Connection, run: Run, now: RunNow) -> freshness.Timing | None:
    """Which version work of the current step waits for; an event says when the reason changes."""
    timing = run.timing
    if timing is None or now.newest_version < 0:
        return None
    before = timing.decision
    past, level = StoredPast(connection), run.config.training.async_level
    decision = timing.decide(past, now.step, now.newest_version, level, run.clock())
    is_news = before is None or before.reason != decision.reason
    if is_news and (view := timing_view(timing)) is not None:
        run.metrics.event("lease_timing", **view.model_dump())
    return decision


def _key_view(
    connection: Connection, run: Run, worker: WorkerRow, observed: Observed, now: RunNow, held_versions: Set[int]
) -> leases.KeyView:
    key, is_reliable = worker.key, observed.is_reliable(run, worker)
    record = delivery_record(worker)
    (counts,) = query(connection, _KeyCounts, KEY_COUNTS, (key, key, now.epoch, now.step))
    works_ahead = is_reliable and now.newest_version >= now.step
    (ahead,) = (
        query(connection, _KeyCounts, KEY_COUNTS, (key, key, now.epoch, now.step + 1)) if works_ahead else (None,)
    )
    return leases.KeyView(
        is_active=worker.state == "active",
        held_versions=sorted(held_versions),
        leases_held=counts.held,
        leases_allowed=deliveries.leases_allowed(record, observed.pace, reliable=is_reliable),
        slots_of_step=counts.holding,
        open_slot=_open_slot(connection, key, now.epoch, now.step, is_reliable=is_reliable),
        late_slot=_late_slot(connection, run, worker, observed, now, held_versions) if is_reliable else None,
        is_reliable=is_reliable,
        backoff_s=deliveries.backoff_s(record, run.clock()),
        slots_of_next=ahead.holding if ahead is not None else 0,
        open_slot_of_next=_open_slot(connection, key, now.epoch, now.step + 1, is_reliable=True) if ahead else None,
    )


def _open_slot(connection: Connection, key: str, epoch: int, step: int, *, is_reliable: bool) -> leases.OpenSlot | None:
    """A dropped slot; one that a batch may wait for goes to a reliable key."""
    found = query(connection, leases.OpenSlot, OPEN_SLOT, (epoch, step, 0 if is_reliable else 1, key))
    return found[0] if found else None


def _late_slot(
    connection: Connection, run: Run, worker: WorkerRow, observed: Observed, now: RunNow, held_versions: Set[int]
) -> leases.OpenSlot | None:
    """The first slot whose keys are late and that this key was drawn for."""
    values = (now.epoch, now.step, run.clock(), worker.numerics_class, batches.BLOCKING_ATTEMPTS, worker.key)
    late_slots = query(connection, backups.LateSlot, LATE_SLOTS, values)
    if not late_slots:
        return None
    poll_s = leases.poll_s(run.presence.polling(has_delivered=worker.delivered_at > 0))
    others = observed.reliable_keys(run, worker.numerics_class) or list(run.presence.workers)[:PAGE]
    for late in late_slots:
        if late.version in held_versions and backups.may_take(
            late, worker.key, others, run.secret, run.clock(), poll_s
        ):
            return leases.OpenSlot(late.slot, late.version)
    return None


def has_other_workers(connection: Connection, run: Run, key: str, *, active: bool) -> bool:
    """Whether another key that is present and does not fail took a lease lately, on probation or not as asked."""
    since, read = run.clock() - run.config.coordinator.lease_s, 0
    page = FIRST_PAGE
    while True:
        holders = query(
            connection,
            _Holder,
            "SELECT worker FROM leases JOIN workers ON workers.key=leases.worker"
            " WHERE by_active_key=? AND issued_at >= ? AND worker <> ? AND workers.failures < ?"
            " ORDER BY issued_at DESC LIMIT ? OFFSET ?",
            (active, since, key, FAILING, page, read),
        )
        if any(run.presence.is_present(holder.worker) for holder in holders):
            return True
        if len(holders) < page:
            return False
        read, page = read + page, PAGE


def _grant(connection: Connection, run: Run, worker: WorkerRow, request_id: str, granted: _Granted) -> LeaseRow:
    now, grant, pace = run.clock(), granted.slot, granted.pace
    row = LeaseRow(
        lease_id=lease_name(run.secret, worker.key, request_id),
        request_id=request_id,
        worker=worker.key,
        step=grant.step,
        slot=grant.slot,
        policy_version=grant.version,
        manifest_digest=granted.version.manifest_digest,
        issued_at=now,
        expires_at=now + deliveries.lease_s(delivery_record(worker), pace),
        state=LeaseState.LEASED,
        by_active_key=worker.state == "active",
        epoch=granted.drawn_by.epoch,
        attempt=granted.drawn_by.attempt,
    )
    slots.take_slot(connection, row, slots.Terms(worker.numerics_class, grant.deferred, now + pace.in_time_s))
    insert(connection, row)
    return row


def _note_first_use(connection: Connection, worker: WorkerRow, version: _Version, now: float) -> WorkerRow:
    """Observes how long the key took to get a version. Of its first one nothing is known: it may have joined later."""
    if version.version <= worker.newest_used:
        return worker
    record = delivery_record(worker)
    if worker.newest_used >= 0:
        record = deliveries.after_first_use(record, now - version.published_at)
    return save_deliveries(connection, worker, record, newest_used=version.version)


def lease_name(secret: bytes, key: str, request_id: str) -> str:
    """One name per request, so that a repeated request means the same lease; nobody else can guess it."""
    return blake3(f"lease\n{key}\n{request_id}".encode(), key=secret).hexdigest()[:32]


def lease_of(run: Run, row: LeaseRow) -> api.Lease:
    seed = slot_seed(step_secret(run.secret, row.step_id), row.slot)
    return api.Lease(
        lease_id=row.lease_id,
        epoch=row.epoch,
        step=row.step,
        attempt=row.attempt,
        slot=row.slot,
        slot_seed=seed.hex(),
        policy_version=row.policy_version,
        manifest_digest=row.manifest_digest,
        expires_at=row.expires_at,
        by_bucket=run.bucket is not None,
    )


def give_back(connection: Connection, run: Run, key: str, lease_id: str) -> None:
    row = find(connection, LeaseRow, "WHERE lease_id=? AND worker=?", (lease_id, key))
    if row is None:
        raise RefusedError("unknown_lease", "This key holds no such lease.", status=404)
    if row.state is LeaseState.LEASED:
        drop_lease(connection, run, row, LeaseState.RETURNED)


def expire_leases(connection: Connection, run: Run) -> bool:
    late = select(connection, LeaseRow, f"WHERE state='{LeaseState.LEASED}' AND expires_at < ?", (run.clock(),))
    for row in late:
        drop_lease(connection, run, row, LeaseState.EXPIRED)
    return bool(late)
