"""What others have kept against a ledger: heads that the coordinator signed, and receipts for files that arrived.

A kept head must be in the chain. One that is not was rewritten or forked away, unless the owner restored a backup later: then it
vouches for entries that the restore lost, which is said but is no finding. A receipt needs an entry about its file once no batch
can hold the file any more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.coordinator.ledger.chain import Entry, Extent
from shoal.coordinator.ledger.findings import Body, Finding
from shoal.protocol.evidence import LedgerHead, Receipt
from shoal.protocol.steps import StepId, step_of

CLOCK_SLACK_S = 60.0
"""Clocks of hosts that sign may differ by this much."""
HELD_BACK_STEPS = 2
"""While entries are held back, a verdict may be among them for this many steps longer."""


@dataclass
class KeptEvidence:
    """What the caller brings; signatures were checked when it was read."""

    heads: list[LedgerHead] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """Hashes of entries, without a signature."""
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def all_heads(self) -> list[LedgerHead]:
        """A receipt names the head of its time, too."""
        named = [LedgerHead(run_id=one.run_id, at=one.at, entries=one.entries, head=one.head) for one in self.receipts]
        return [*self.heads, *named]


@dataclass(frozen=True)
class Restore:
    entry: int
    made_at: float
    """When the backup was made."""
    at: float


class KeptCheck:
    def __init__(self, kept: KeptEvidence) -> None:
        self.notes: list[str] = []
        self._kept = kept
        self._missing = {head.head: head for head in sorted(kept.all_heads, key=lambda one: one.at) if head.entries}
        self._hashes = set(kept.hashes)
        self._open = {receipt.lease: receipt for receipt in kept.receipts}
        self._restores: list[Restore] = []
        self._epochs: dict[int, int] = {}
        """Epoch → its first step."""
        self._last_step: tuple[int, StepId] | None = None
        self._async_level = 0

    def take(self, entry: Entry, body: Body) -> Iterator[Finding]:
        self._hashes.discard(entry.hash)
        head = self._missing.get(entry.hash)
        if head is not None and head.entries == entry.seq + 1:
            del self._missing[entry.hash]
        if entry.kind == "restored":
            self._restores.append(Restore(entry.seq, float(body["backup_made_at"]), float(body["restored_at"])))
        elif entry.kind == "terms":
            self._async_level = int(body["async_level"])
        elif entry.kind == "recorded":
            self._last_step = entry.seq, step_of(body)
        elif entry.kind == "rewound":
            self._epochs[step_of(body).epoch] = step_of(body).step
        elif entry.kind in ("verdict", "quarantine"):
            yield from self._answer(entry, body)
        elif entry.kind == "ban":
            self._open = {
                lease: one
                for lease, one in self._open.items()
                if one.worker != body["worker"] or one.entries > entry.seq
            }

    def _answer(self, entry: Entry, body: Body) -> Iterator[Finding]:
        receipt = self._open.pop(body["lease"], None)
        if receipt is None:
            return
        if receipt.file != body["file"] or receipt.worker != body["worker"]:
            yield Finding(entry.seq, f"the receipt of lease {receipt.lease} is for another file or worker")
        if receipt.at > entry.at + CLOCK_SLACK_S:
            yield Finding(entry.seq, f"the verdict is dated {receipt.at - entry.at:.0f} s before the file arrived")

    def finish(self, extent: Extent, sealed_at: float) -> Iterator[Finding]:
        entries, held_back = extent.entries, extent.made - extent.entries
        newer = [head for head in self._missing.values() if head.entries > entries and head.at > sealed_at]
        later = [head for head in self._missing.values() if head not in newer and self._is_held_back(head, extent)]
        for head in self._missing.values():
            if head not in newer and head not in later:
                yield from self._explain(head, extent.made)
        if newer:
            self.notes.append(f"{len(newer)} kept heads are newer than this export and are not in it")
        if unproven := [head for head in later if head.head != extent.newest]:
            self.notes.append(f"{len(unproven)} kept heads are of entries that are not public yet; check them again")
        for known in sorted(self._hashes - {extent.newest}):
            text = f"no entry has the kept hash {known[:12]}…"
            if held_back:
                self.notes.append(f"{text}, but {held_back} entries are not public yet; check it again")
            else:
                yield Finding(max(entries - 1, 0), f"{text}: the ledger was rewritten, cut or forked")
        yield from self._overdue(HELD_BACK_STEPS if held_back else 0)

    @staticmethod
    def _is_held_back(head: LedgerHead, extent: Extent) -> bool:
        """A head of entries that exist and are not public; the newest one is known from the seal."""
        if head.entries == extent.made:
            return head.head == extent.newest
        return extent.entries < head.entries < extent.made

    def _explain(self, head: LedgerHead, entries: int) -> Iterator[Finding]:
        """A head that is not in the chain: lost by a later restore, or a contradiction."""
        lost_by = [one for one in self._restores if one.entry < head.entries and head.at <= one.at + CLOCK_SLACK_S]
        what = f"a kept head of {head.entries} entries ({head.head[:12]}…)"
        if lost_by:
            lost = head.entries - lost_by[-1].entry
            self.notes.append(
                f"{what} is from before the restore of entry {lost_by[-1].entry}, which lost {lost} entries or more"
            )
        elif any(one.entry < head.entries for one in self._restores):
            yield Finding(
                head.entries - 1,
                f"{what} was signed after the restore and is not in this chain: two chains go on (a fork)",
            )
        elif head.entries > entries:
            yield Finding(max(entries - 1, 0), f"{what} names entries that are missing here: the end was cut off")
        else:
            yield Finding(
                head.entries - 1,
                f"{what} is not in this chain: entries up to this one were rewritten, or it was forked",
            )

    def _overdue(self, slack: int) -> Iterator[Finding]:
        """Receipts without an entry about their file although no batch can hold it any more, for `slack` steps."""
        waiting = 0
        for receipt in self._open.values():
            if self._is_lost(receipt):
                self.notes.append(f"the file of lease {receipt.lease} arrived before a restore that lost it")
            elif self._last_step is not None and self._is_past(receipt, self._last_step[1], slack):
                yield Finding(
                    self._last_step[0],
                    f"step {receipt.step_id} slot {receipt.slot} has a receipt (lease {receipt.lease}), but no verdict:"
                    f" step {self._last_step[1]} is recorded and its batch cannot hold the file any more",
                )
            else:
                waiting += 1
        if waiting:
            self.notes.append(f"{waiting} files with a receipt have no verdict yet; they are not overdue")

    def _is_lost(self, receipt: Receipt) -> bool:
        return any(one.made_at - CLOCK_SLACK_S <= receipt.at <= one.at + CLOCK_SLACK_S for one in self._restores)

    def _is_past(self, receipt: Receipt, last: StepId, slack: int) -> bool:
        """Files of a voided step are decided before the new epoch gets far."""
        if last.epoch == receipt.epoch:
            return last.step >= receipt.step + self._async_level + slack
        return last.step > self._epochs.get(last.epoch, 0) + self._async_level + slack

    def unchecked(self) -> Iterator[str]:
        if not self._kept.heads and not self._kept.hashes:
            yield (
                "whether the coordinator rewrote its own ledger, consistently and with its key: only a head that somebody"
                " else kept shows that. Give --head."
            )
        if not self._kept.receipts:
            yield "whether verdicts were left out: only receipts show that. Give --receipts."
