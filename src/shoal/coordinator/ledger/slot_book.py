"""Which file fills which slot, and which groups wait for a batch, from the verdicts of a ledger.

A slot is filled once and so paid once; a batch holds groups that were accepted, useful, young enough, not withdrawn, and in no
other batch. Only the last steps are remembered, so that a long ledger needs no more memory than a short one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.coordinator.ledger.findings import Body, Finding
from shoal.protocol.steps import StepId, group_name, step_of

REMEMBERED_STEPS = 256
STEPS_AHEAD = 2
"""A step begins when the batch before it is proposed, which may be before that batch is recorded."""
FILLING = ("counts", "unpaid")
"""Uses of a file that fills its slot."""
SHARING = ("further", "late")
"""Uses of a file whose slot another file fills."""


class Counting(NamedTuple):
    """The file that fills a slot."""

    worker: str
    lease: str
    tokens: int
    """That it was paid for."""


class WaitingGroup(NamedTuple):
    worker: str
    version: int


@dataclass
class StepSlots:
    filled: dict[int, Counting] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    """Leases with an accepted file."""
    decided: set[str] = field(default_factory=set)
    shared: Counter[int] = field(default_factory=Counter)
    """Slots whose credit further files have shared, and how often."""


class SlotBook:
    def __init__(self) -> None:
        self._steps: dict[StepId, StepSlots] = {}
        self._waiting: dict[str, WaitingGroup] = {}
        self._consumed: dict[int, dict[str, WaitingGroup]] = {}
        self._slot_tokens, self._async_level = 0, 0
        self._begun = StepId()
        self._ended: dict[int, int] = {}
        """Epoch → the entry that ended it."""

    def set_terms(self, slot_tokens: int, async_level: int) -> None:
        self._slot_tokens, self._async_level = slot_tokens, async_level

    def begin(self, committed: StepId) -> None:
        """A commitment is made when the step before it begins: its batch may be proposed before earlier ones are recorded."""
        self._begun = max(self._begun, StepId(committed.epoch, committed.step - 1))

    def counting(self, body: Body) -> Counting | None:
        """The file whose credit this one shares, if the verdict names it."""
        found = self._steps.get(step_of(body), StepSlots()).filled.get(body["slot"])
        return found if found is not None and found.lease == body["shares"] else None

    def take_verdict(self, seq: int, body: Body, *, usable: bool, current: StepId) -> Iterator[Finding]:
        step, use = step_of(body), body["use"]
        if step.epoch < current.epoch:
            yield from self._check_arrival(seq, step, body["position"])
        elif step.epoch > current.epoch or not -REMEMBERED_STEPS <= step.step - current.step <= STEPS_AHEAD:
            yield Finding(seq, f"a verdict on step {step} while step {current} is the current one")
        place = self._steps.setdefault(step, StepSlots())
        yield from self._check_use(seq, body, place, usable=usable, current=current)
        if not 0 <= body["tokens"] <= self._slot_tokens:
            yield Finding(seq, f"{body['tokens']} tokens are counted, a slot has at most {self._slot_tokens}")
        if use in FILLING:
            paid = body["tokens"] if use == "counts" else 0
            place.filled.setdefault(body["slot"], Counting(body["worker"], body["lease"], paid))
            for number in body["useful"] if step.epoch == current.epoch else ():
                name = group_name(step, body["slot"], number)
                self._waiting[name] = WaitingGroup(body["worker"], body["version"])
        if body["accepted"]:
            place.accepted.add(body["lease"])
        place.decided.add(body["lease"])
        place.shared[body["slot"]] += use == "further"

    def _check_arrival(self, seq: int, step: StepId, position: int) -> Iterator[Finding]:
        """Work of a voided step is paid for if it had arrived."""
        if position > self._ended.get(step.epoch, -1):
            yield Finding(seq, f"the file of step {step} arrived after a rewind had voided that step")

    def _check_use(self, seq: int, body: Body, place: StepSlots, *, usable: bool, current: StepId) -> Iterator[Finding]:
        use, slot, counting = body["use"], body["slot"], place.filled.get(body["slot"])
        if (use == "rejected") == body["accepted"]:
            yield Finding(seq, f"the file is {use} and {'accepted' if body['accepted'] else 'not accepted'}")
        if (use == "confirmed" or (use == "rejected" and body["lease"] in place.decided)) and (
            body["lease"] not in place.accepted or not body["audited"]
        ):
            yield Finding(seq, "a second verdict without an accepted first one and an audit")
        if use not in ("confirmed", "rejected") and body["lease"] in place.decided:
            yield Finding(seq, "the file of this lease has a verdict already")
        if use in FILLING and counting is not None:
            yield Finding(seq, f"slot {slot} is filled a second time; the file of {counting.worker[:12]}… fills it")
        if use in SHARING and counting is None:
            yield Finding(seq, f"another file is said to fill slot {slot}, but none does")
        if use == "further" and body["shares"] is not None and not self.counting(body):
            yield Finding(seq, f"the file shares the credit of a lease that does not fill slot {slot}")
        if use == "further" and body["shares"] is not None and body["files"] <= place.shared[slot]:
            yield Finding(seq, f"the credit of slot {slot} is shared among {body['files']} other files; there are more")
        if body["accepted"] and use != "confirmed" and usable == (use == "unused"):
            yield Finding(seq, f"the file is {use}, the record of its key says otherwise")
        if use == "unpaid" and body["version"] >= max(current, self._begun).step - self._async_level:
            yield Finding(seq, "the file earns nothing although its version was young enough")

    def consume(self, seq: int, step: StepId, groups: Sequence[str]) -> Iterator[Finding]:
        for name in groups:
            group = self._waiting.pop(name, None)
            if group is None:
                yield Finding(
                    seq, f"group {name} is in the batch, but no verdict accepted it, or it is used or withdrawn"
                )
                continue
            self._consumed.setdefault(step.step, {})[name] = group
            if group.version < step.step - self._async_level:
                yield Finding(seq, f"group {name} of version {group.version} is too old for the batch of step {step}")
        self._waiting = {
            name: group for name, group in self._waiting.items() if group.version >= step.step + 1 - self._async_level
        }
        for old in [known for known in self._steps if known.step + REMEMBERED_STEPS < step.step]:
            del self._steps[old]
        self._consumed = {number: groups for number, groups in self._consumed.items() if number + 2 >= step.step}

    def restore(self, step: int) -> bool:
        """The groups of a recalled batch wait again; false if there is no such batch."""
        groups = self._consumed.pop(step, None)
        self._waiting.update(groups or {})
        return groups is not None

    def withdraw(self, worker: str) -> None:
        """The groups of a banned key enter no batch."""
        self._waiting = {name: group for name, group in self._waiting.items() if group.worker != worker}

    def rewind(self, seq: int, first: StepId) -> None:
        """No group of an earlier epoch enters a batch any more."""
        self._waiting, self._consumed = {}, {}
        self._ended.setdefault(first.epoch - 1, seq)
