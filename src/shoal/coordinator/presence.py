"""Presence: which workers and relays were seen when.

It lives in memory: a heartbeat per worker every few seconds must not cost a durable write. After a restart every known worker
counts as just seen, so that a short outage marks none as gone. Processes that share a database exchange what they heard every few
seconds, so that no process marks a worker as gone that talks to another one. Memory never runs ahead of the database: what
a transaction learns is applied once it is committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.coordinator.relays import MEMORY_S, KnownRelay, Relays
from shoal.coordinator.rules.presence import Stamp, is_newer, is_present
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.store.rows import query
from shoal.protocol import api

CLOCK_SLACK_S = 2.0
"""Hosts of one database may disagree by this much about the time."""
EXCHANGES_PER_SILENCE = 6
"""How often presence is exchanged in the time after which a silent worker is marked as gone."""
KEPT_SILENCES = 10
POLLERS_S = 10.0
RECENT = 0.1
"""Weight of the newest heartbeat among those before it."""


@dataclass
class WorkerPresence:
    seen_at: float
    activity: str = ""
    tokens_generated: int = 0
    bytes_received: int = 0
    newest: Stamp = (0.0, "")
    waiting: float = 0.0
    """Share of its last heartbeats at which it waited for work; `fetching`: for weights. One moment says little: all workers fetch
    when a version is published."""
    fetching: float = 0.0

    def note(self, body: api.HeartbeatBody, stamp: Stamp) -> None:
        self.newest = stamp
        self.observe(body.activity)
        self.tokens_generated, self.bytes_received = body.tokens_generated, body.bytes_received

    def observe(self, activity: str) -> None:
        self.activity = activity
        self.waiting += RECENT * (activity.startswith("waiting") - self.waiting)
        self.fetching += RECENT * (activity.startswith("fetching") - self.fetching)


class Pollers:
    """How many keys ask for work, counted over the last seconds without a look at each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.since = clock, 0.0
        self.newest: set[str] = set()
        self.before: set[str] = set()

    def note(self, key: str) -> None:
        if self.clock() - self.since >= POLLERS_S:
            self.turn()
        self.newest.add(key)

    def count(self) -> int:
        if self.clock() - self.since >= POLLERS_S:
            self.turn()
        return max(len(self.newest), len(self.before))

    def turn(self) -> None:
        """Begins to count again; those of the last seconds stay for as long again."""
        age_s = self.clock() - self.since
        self.before = self.newest if age_s < 2 * POLLERS_S else set()
        self.newest, self.since = set(), self.clock()


class Presence:
    def __init__(self, clock: Callable[[], float], gone_after_s: float, *, is_shared: bool = False) -> None:
        self.clock, self.gone_after_s, self.is_shared = clock, gone_after_s, is_shared
        self.workers: dict[str, WorkerPresence] = {}
        self.relays = Relays(clock, gone_after_s)
        self.proven: set[str] = set()
        """Keys with accepted work that are not banned: they share no budget with strangers."""
        self.pollers = Pollers(clock)
        self.delivering_pollers = Pollers(clock)
        self.pending_exchange: set[str] = set()
        """Keys that this process saw since its last exchange."""
        self.exchanged_at = 0.0
        self.validator_seen_at = clock()
        """When a validator last asked for work; a start counts as one, so that a restart raises no alert."""

    def seen(self, key: str) -> WorkerPresence:
        worker = self.workers.setdefault(key, WorkerPresence(self.clock()))
        worker.seen_at = self.clock()
        if self.is_shared:
            self.pending_exchange.add(key)
        return worker

    def note_asking(self, key: str, *, has_delivered: bool) -> None:
        self.pollers.note(key)
        if has_delivered:
            self.delivering_pollers.note(key)

    def polling(self, *, has_delivered: bool) -> int:
        """Keys that ask for work; for one that has delivered, only such keys, or idle strangers could slow it down."""
        return (self.delivering_pollers if has_delivered else self.pollers).count()

    def hear(self, key: str, body: api.HeartbeatBody, stamp: Stamp) -> None:
        """Takes a heartbeat in, unless this one or a newer one was heard: a replay keeps no worker present."""
        known = self.workers.get(key)
        if known is None or is_newer(stamp, known.newest):
            self.seen(key).note(body, stamp)

    def is_present(self, key: str) -> bool:
        worker = self.workers.get(key)
        return worker is not None and is_present(worker.seen_at, self.clock(), self.gone_after_s)

    def was_seen_since(self, key: str, at: float) -> bool:
        worker = self.workers.get(key)
        return worker is not None and worker.seen_at > at

    def count(self) -> int:
        return sum(self.is_present(key) for key in list(self.workers))

    def silent(self) -> list[str]:
        """Keys that were not seen for too long."""
        return [key for key in list(self.workers) if not self.is_present(key)]

    def forget(self, key: str) -> None:
        """A key that is gone is not present."""
        self.workers.pop(key, None)

    def forget_banned(self, key: str) -> None:
        self.forget(key)
        self.proven.discard(key)

    def forget_silent(self, key: str) -> None:
        """Forgets a key that was marked as gone, unless it was heard meanwhile."""
        if not self.is_present(key):
            self.forget(key)

    def restart(self, keys: Iterable[str], proven: Iterable[str]) -> None:
        """Every known worker counts as just seen."""
        now = self.clock()
        self.proven = set(proven)
        self.workers.update({key: WorkerPresence(now) for key in keys})


@dataclass(frozen=True)
class _SeenWorker:
    key: str
    seen_at: float
    activity: str
    tokens_generated: int
    bytes_received: int


@dataclass(frozen=True)
class _SeenRelay:
    key: str
    seen_at: float
    address: str
    body: str


def exchange(connection: Transaction, presence: Presence, proven_keys: Callable[[Connection], set[str]]) -> None:
    """Writes what this process heard, and takes in what others heard once that is committed."""
    now, since = presence.clock(), presence.exchanged_at - CLOCK_SLACK_S
    if now - presence.exchanged_at < presence.gone_after_s / EXCHANGES_PER_SILENCE:
        return
    pushed = _push_workers(connection, presence)
    _push_relays(connection, presence)
    workers = query(connection, _SeenWorker, "SELECT * FROM presence WHERE seen_at > ?", (since,))
    relays = query(connection, _SeenRelay, "SELECT * FROM relays WHERE seen_at > ?", (now - MEMORY_S,))
    proven = proven_keys(connection)
    kept_s = KEPT_SILENCES * presence.gone_after_s
    connection.execute("DELETE FROM presence WHERE seen_at < ?", (now - kept_s,))
    connection.execute("DELETE FROM relays WHERE seen_at < ?", (now - MEMORY_S,))

    def exchanged() -> None:
        presence.exchanged_at, presence.proven = now, proven
        presence.pending_exchange -= {key for key, at in pushed.items() if not presence.was_seen_since(key, at)}
        _pull_workers(presence, workers)
        _pull_relays(presence, relays)

    connection.on_commit(exchanged)


def _push_workers(connection: Connection, presence: Presence) -> dict[str, float]:
    """Writes the workers that this process saw; returns when each was seen."""
    pending = presence.pending_exchange.copy()  # the loop's thread adds to it
    known = [(key, worker) for key in sorted(pending) if (worker := presence.workers.get(key)) is not None]
    connection.executemany(
        "INSERT INTO presence (key, seen_at, activity, tokens_generated, bytes_received) VALUES (?,?,?,?,?)"
        " ON CONFLICT (key) DO UPDATE SET seen_at=excluded.seen_at, activity=excluded.activity,"
        " tokens_generated=excluded.tokens_generated, bytes_received=excluded.bytes_received"
        " WHERE presence.seen_at < excluded.seen_at",
        [(key, one.seen_at, one.activity, one.tokens_generated, one.bytes_received) for key, one in known],
    )
    return {key: worker.seen_at for key, worker in known}


def _push_relays(connection: Connection, presence: Presence) -> None:
    connection.executemany(
        "INSERT INTO relays (key, seen_at, address, body) VALUES (?,?,?,?)"
        " ON CONFLICT (key) DO UPDATE SET seen_at=excluded.seen_at, address=excluded.address, body=excluded.body"
        " WHERE relays.seen_at < excluded.seen_at",
        [
            (key, relay.seen_at, relay.address, relay.body.model_dump_json())
            for key, relay in list(presence.relays.known.items())
        ],
    )


def _pull_workers(presence: Presence, heard: Iterable[_SeenWorker]) -> None:
    for row in heard:
        known = presence.workers.get(row.key)
        if known is None or known.seen_at < row.seen_at:
            seen = WorkerPresence(row.seen_at, "", row.tokens_generated, row.bytes_received)
            if known is not None:
                seen.waiting, seen.fetching = known.waiting, known.fetching
            seen.observe(row.activity)
            presence.workers[row.key] = seen


def _pull_relays(presence: Presence, heard: Iterable[_SeenRelay]) -> None:
    for row in heard:
        known = presence.relays.known.get(row.key)
        if known is None or known.seen_at < row.seen_at:
            body = api.RelayBody.model_validate_json(row.body)
            since, turn_at = (row.seen_at, None) if known is None else (known.announced_at, known.turn_at)
            presence.relays.known[row.key] = KnownRelay(
                row.seen_at, body, row.address, announced_at=since, turn_at=turn_at
            )
