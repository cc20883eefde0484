"""What the coordinator knows, as objects in memory: keys, slots, leases, files, groups, and the tallies that a decision needs.

The names are those of `coordinator.store.tables`; columns that no rule reads are left out. Every index here is something that the
store gets from SQL, so that a request costs the same in a swarm of ten and of ten thousand.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from shoal.coordinator.rules import batches, deliveries
from shoal.coordinator.rules.trust import TrustRecord
from shoal.coordinator.states import LeaseState, SlotState, SubmissionState
from shoal.protocol import api
from shoal.simulation.operations import TrainedGroup

NO_DELIVERIES = deliveries.Record()


@dataclass(slots=True)
class Key:
    key: str
    numerics_class: str
    trust: TrustRecord
    record: deliveries.Record = NO_DELIVERIES
    delivered_at: float = 0.0
    received_at: float = 0.0
    newest_used: int = -1
    accepted: int = 0
    rejected: int = 0
    banned_at: float | None = None
    leased: dict[str, "Lease"] = field(default_factory=dict)
    """Leases without a file."""
    holding: Counter[int] = field(default_factory=Counter)
    """Leases that it holds or has submitted, by step."""
    files: dict[str, "File"] = field(default_factory=dict)
    """Files without a verdict, or with groups that a batch may still take."""
    waiting_unaudited: int = 0
    promised: int = 0
    """Groups that claimed files may leave without an audit."""
    least_limit: float = math.inf
    """From which limit of missed deliveries on it is reliable; not a number if its work is not used. `Observer` keeps it."""
    longest_silence_s: float = 0.0
    """For how long it may deliver nothing and still take part. `Observer` keeps it."""
    allowed: tuple[deliveries.Record, deliveries.Pace, bool, int] | None = None
    """How many leases it may hold, and what that followed from."""
    asked_at: float = 0.0
    turns: list[int] = field(default_factory=lambda: [-1, -1])
    """In which it was last counted among the keys that ask, and among those of them that have delivered."""


@dataclass(slots=True)
class Lease:
    lease_id: str
    key: Key
    step: int
    slot: "Slot"
    version: int
    issued_at: float
    expires_at: float
    by_active_key: bool
    state: LeaseState = LeaseState.LEASED
    file: "File | None" = None
    view: api.Lease | None = None
    """As its key and a validator see it."""


@dataclass(slots=True, eq=False)
class Slot:
    step: int
    number: int
    state: SlotState
    lease: Lease | None
    version: int
    numerics_class: str
    deferred: bool
    due_at: float
    attempts: int = 1
    leases: list[Lease] = field(default_factory=list)
    useful: int = 0
    """Groups of its file that wait for a batch."""

    def was_held_by(self, key: Key) -> bool:
        return any(lease.key is key for lease in self.leases)


@dataclass(slots=True, eq=False)
class File:
    submission_id: str
    lease: Lease
    digest: str
    received_at: float
    audit_groups: list[int]
    audit_step: int
    number: int
    """In the order of arrival."""
    state: SubmissionState = SubmissionState.PENDING
    claim_id: str | None = None
    claim_expires: float = 0.0
    tries: int = 0
    faults: int = 0
    unaudited_limit: int = 0
    verdict: api.VerdictBody | None = None
    waiting: set[str] = field(default_factory=set)
    """Names of its groups that wait for a batch."""
    proposed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Batch:
    step: int
    formed_at: float
    generated: int
    useful: int
    """Of those generated."""
    groups: dict[str, batches.GroupView]
    """By name, in the order of training."""
    files: dict[str, File]
    """The same, until it is recorded."""
    expired: int
    trained: list[TrainedGroup] = field(default_factory=list)
    is_recorded: bool = False


@dataclass(slots=True)
class Version:
    version: int
    published_at: float
    stage_s: float = 0.0


@dataclass(slots=True)
class StepTables:
    """One step: its slots and what is counted of them."""

    slots: list[Slot] = field(default_factory=list)
    tally: Counter[tuple[SlotState, bool]] = field(default_factory=Counter)
    """Slots by state, and whether they are deferred."""
    probation: int = 0
    open_slots: dict[int, Slot] = field(default_factory=dict)
    due: list[tuple[float, int]] = field(default_factory=list)
    """Heap of slots by when another key gets them too; entries that are no longer true are skipped."""
    late: dict[int, float] = field(default_factory=dict)
    """Slots that another key may fill too, by when they were due."""
    overdue: list[tuple[float, int]] = field(default_factory=list)
    """The same, the most overdue first."""
    blocking: list[int] = field(default_factory=list)
    """Heap of slots that may hold back a batch; entries that are no longer true are skipped."""
    opened_at: float | None = None
    counted_to: int = 0
    """Slots before this one are counted in `ready`."""
    ready: int = 0
    """Useful groups in them that no batch holds and that are not deferred."""


@dataclass(slots=True)
class Tables:
    keys: dict[str, Key] = field(default_factory=dict)
    by_delivery: dict[str, Key] = field(default_factory=dict)
    """Keys that have delivered and are not banned, the last one at the end."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """Those without a file."""
    expiring: list[tuple[float, int, Lease]] = field(default_factory=list)
    recent: dict[bool, deque[tuple[float, Key]]] = field(default_factory=lambda: {False: deque(), True: deque()})
    """Grants by whether the key was active, in order."""
    steps: dict[int, StepTables] = field(default_factory=dict)
    waited_for: dict[int, list[tuple[float, int, File]]] = field(default_factory=dict)
    """Heaps of files without a verdict, by step."""
    pending: list[tuple[float, int, File]] = field(default_factory=list)
    claims: list[tuple[float, int, File]] = field(default_factory=list)
    undecided: dict[str, File] = field(default_factory=dict)
    groups: dict[str, batches.GroupView] = field(default_factory=dict)
    """Useful groups that wait for a batch, and the files that they are in."""
    file_of: dict[str, File] = field(default_factory=dict)
    waiting: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    """The same by step, version, and whether they are deferred."""
    revision: int = 0
    """Rises with every change of a tally, every batch and every version."""
    batches: list[Batch] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    largest_version_bytes: int = 0

    @property
    def step(self) -> int:
        return len(self.batches)

    def of_step(self, step: int) -> StepTables:
        found = self.steps.get(step)
        if found is None:
            found = self.steps[step] = StepTables()
        return found
