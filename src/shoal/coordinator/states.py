"""The five state machines of the coordinator: slot, lease, submission, group, batch.

A state changes only along a transition of its machine; `store.rows.update` is the one place where states change, and it asks
`Machine.require`. SQL is built from the names here, and `mermaid` draws the diagrams of docs/design/coordinator.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from shoal.errors import ShoalError


class SlotState(StrEnum):
    """A slot of a step: one unit of work. A late one is leased to a second key too; the first accepted file counts."""

    LEASED = "leased"
    SUBMITTED = "submitted"
    RESOLVED = "resolved"
    OPEN = "open"
    CLOSED = "closed"
    VOID = "void"


class LeaseState(StrEnum):
    """The right of one key to fill one slot until a deadline."""

    LEASED = "leased"
    SUBMITTED = "submitted"
    RETURNED = "returned"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    QUARANTINED = "quarantined"
    VOID = "void"


class SubmissionState(StrEnum):
    """An uploaded rollout file."""

    PENDING = "pending"
    CLAIMED = "claimed"
    DECIDED = "decided"
    QUARANTINED = "quarantined"
    VOID = "void"


class GroupState(StrEnum):
    """The samples of one task in an accepted submission."""

    ACCEPTED = "accepted"
    NO_SIGNAL = "no_signal"
    PROPOSED = "proposed"
    WITHHELD = "withheld"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class BatchState(StrEnum):
    """The groups of one training step: first a proposal to the trainer, then a record that every resume reads."""

    PROPOSED = "proposed"
    RECORDED = "recorded"
    RECALLED = "recalled"


State = TypeVar("State", bound=StrEnum)


class TransitionError(ShoalError):
    """A change of state that no machine has: a defect of the coordinator, never a user's mistake."""

    code = "transition"
    permanent = False


@dataclass(frozen=True)
class Machine(Generic[State]):
    name: str
    initial: Mapping[State, str]
    """States in which a row may be inserted, and what causes it."""
    transitions: Mapping[tuple[State, State], str]

    def require_initial(self, state: State) -> None:
        if state not in self.initial:
            raise TransitionError(f"A {self.name} cannot begin as {state}.")

    def require(self, before: State, after: State) -> None:
        if (before, after) not in self.transitions:
            raise TransitionError(f"A {self.name} cannot go from {before} to {after}.")

    def states(self) -> set[State]:
        return {*self.initial, *(state for pair in self.transitions for state in pair)}

    def final(self) -> set[State]:
        return self.states() - {before for before, _ in self.transitions}


SLOT = Machine(
    "slot",
    {SlotState.LEASED: "a key takes the next slot of the step"},
    {
        (SlotState.LEASED, SlotState.SUBMITTED): "the file is uploaded",
        (SlotState.LEASED, SlotState.OPEN): "its last lease ends without a file",
        (SlotState.SUBMITTED, SlotState.RESOLVED): "the file is accepted",
        (SlotState.SUBMITTED, SlotState.LEASED): "the file does not count, another key still works on it",
        (SlotState.SUBMITTED, SlotState.OPEN): "the file is rejected, quarantined, or not used",
        (SlotState.OPEN, SlotState.LEASED): "a different key takes it",
        (SlotState.OPEN, SlotState.CLOSED): "the batch of the step is formed",
        (SlotState.RESOLVED, SlotState.VOID): "its key is banned during the step",
    },
)
LEASE = Machine(
    "lease",
    {LeaseState.LEASED: "granted"},
    {
        (LeaseState.LEASED, LeaseState.SUBMITTED): "the file is uploaded",
        (LeaseState.LEASED, LeaseState.RETURNED): "the worker gives it back",
        (LeaseState.LEASED, LeaseState.EXPIRED): "the deadline passes",
        (LeaseState.LEASED, LeaseState.ABANDONED): "the worker is marked as gone",
        (LeaseState.LEASED, LeaseState.VOID): "its key is banned, or a rewind voids its step",
        (LeaseState.SUBMITTED, LeaseState.VOID): "its key is banned",
        (LeaseState.SUBMITTED, LeaseState.QUARANTINED): "the file is quarantined",
    },
)
SUBMISSION = Machine(
    "submission",
    {SubmissionState.PENDING: "uploaded"},
    {
        (SubmissionState.PENDING, SubmissionState.CLAIMED): "a validator claims it",
        (SubmissionState.PENDING, SubmissionState.VOID): "its key is banned",
        (SubmissionState.CLAIMED, SubmissionState.PENDING): "a fault, the claim runs out, or an audit follows",
        (SubmissionState.CLAIMED, SubmissionState.DECIDED): "accepted or rejected",
        (SubmissionState.DECIDED, SubmissionState.PENDING): "in doubt, an audit of all groups follows",
        (SubmissionState.CLAIMED, SubmissionState.QUARANTINED): "too many faults",
        (SubmissionState.CLAIMED, SubmissionState.VOID): "its key is banned",
    },
)
GROUP = Machine(
    "group",
    {
        GroupState.ACCEPTED: "accepted, rewards differ",
        GroupState.NO_SIGNAL: "accepted, rewards are equal",
        GroupState.WITHDRAWN: "accepted after a rewind voided its step",
    },
    {
        (GroupState.ACCEPTED, GroupState.PROPOSED): "a batch is proposed with it",
        (GroupState.ACCEPTED, GroupState.EXPIRED): "too old for the batch",
        (GroupState.ACCEPTED, GroupState.WITHDRAWN): "its key is banned, its file rejected, or its step voided",
        (GroupState.PROPOSED, GroupState.CONSUMED): "the batch is recorded",
        (GroupState.PROPOSED, GroupState.WITHHELD): "the trainer finds it improbable, an audit follows",
        (GroupState.PROPOSED, GroupState.WITHDRAWN): "its key is banned, its file rejected, or its step voided",
        (GroupState.CONSUMED, GroupState.WITHHELD): "its batch is recalled, an audit follows",
        (GroupState.CONSUMED, GroupState.PROPOSED): "its batch is recalled, it was audited before",
        (GroupState.WITHHELD, GroupState.ACCEPTED): "the audit was clean",
        (GroupState.WITHHELD, GroupState.PROPOSED): "its batch was recalled, the audit was clean",
        (GroupState.WITHHELD, GroupState.WITHDRAWN): "its key is banned, its file rejected, or its step voided",
        (GroupState.CONSUMED, GroupState.WITHDRAWN): "a rewind voids its batch",
    },
)
BATCH = Machine(
    "batch",
    {BatchState.PROPOSED: "enough groups are ready"},
    {
        (BatchState.PROPOSED, BatchState.RECORDED): "the trainer has checked every group",
        (BatchState.PROPOSED, BatchState.RECALLED): "the owner says so",
        (BatchState.RECORDED, BatchState.RECALLED): "its training diverges, or the owner says so",
        (BatchState.RECALLED, BatchState.PROPOSED): "every group of it is audited",
    },
)
MACHINES: tuple[
    Machine[SlotState] | Machine[LeaseState] | Machine[SubmissionState] | Machine[GroupState] | Machine[BatchState], ...
] = (SLOT, LEASE, SUBMISSION, GROUP, BATCH)

FILLING = (SlotState.LEASED, SlotState.SUBMITTED)
"""Slots that a key works on or has filled without a verdict."""
HOLDING = (LeaseState.LEASED, LeaseState.SUBMITTED)
"""Leases that count as filled by their key."""
DROPPED = (LeaseState.RETURNED, LeaseState.EXPIRED, LeaseState.ABANDONED)
"""Leases that ended without a file."""
UNUSED = (GroupState.ACCEPTED, GroupState.PROPOSED, GroupState.WITHHELD)
"""Groups that no recorded batch holds yet, and one may."""
UNDECIDED = (SubmissionState.PENDING, SubmissionState.CLAIMED)
ENDED = (SubmissionState.DECIDED, SubmissionState.QUARANTINED, SubmissionState.VOID)


def one_of(*states: StrEnum) -> str:
    """The states as an SQL list."""
    return "(" + ",".join(f"'{state}'" for state in states) + ")"


def mermaid(machine: Machine[State]) -> str:
    """The machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {state}: {cause}" for state, cause in machine.initial.items())]
    lines += [f"    {before} --> {after}: {cause}" for (before, after), cause in machine.transitions.items()]
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in sorted(machine.final()))])
