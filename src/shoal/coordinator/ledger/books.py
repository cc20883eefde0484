"""The books of a run, kept again from the entries of its ledger alone.

A verdict determines what must follow it: credit, held and released, shares of backup files, slashes and bans. The next entries are
compared with that, one by one; anything missing, changed or added is located. Trust, drift and the audit rate of every key are
recomputed by the same rules that the coordinator uses. After a difference the books go on with what should have been, so that one
false entry is one finding.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.ledger.findings import Body, Finding
from shoal.coordinator.ledger.slot_book import REMEMBERED_STEPS, SlotBook
from shoal.coordinator.rules import credit, trust, unaudited
from shoal.coordinator.rules.drift import DriftLevel
from shoal.protocol.steps import StepId, step_of
from shoal.protocol.verdicts import Reason, public_reason

CONSEQUENCES = ("credit", "slash", "ban")
ROUNDING = 1e-9


@dataclass
class Account:
    held: int = 0
    released: int = 0
    slashed: int = 0
    record: trust.TrustRecord = field(default_factory=lambda: trust.TrustRecord("probation"))
    drift: DriftLevel = "honest"
    rates: list[tuple[int, float]] = field(default_factory=list)
    """From which entry on which audit rate follows from the record."""

    def rate_at(self, position: int) -> float:
        return _rate_at(self.rates, position, 1.0)


def _rate_at(rates: list[tuple[int, float]], position: int, at_first: float) -> float:
    """What was in force when the ledger had this number of entries."""
    place = bisect_right(rates, (position, 2.0))
    return rates[place - 1][1] if place else at_first


@dataclass(frozen=True)
class Due:
    """An entry that must come next."""

    kind: str
    worker: str
    fields: Mapping[str, object]
    cause: int
    """The entry that calls for it."""
    reason: str = ""
    """How the text of a ban begins."""

    def differences(self, body: Body) -> list[str]:
        expected = {"worker": self.worker, **self.fields}
        found = [
            f"{name} is {body.get(name)!r}, not {value!r}"
            for name, value in expected.items()
            if body.get(name) != value
        ]
        if not str(body.get("reason", "")).startswith(self.reason):
            found.append(f"reason does not begin with {self.reason!r}")
        return found


class Books:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.verdicts = 0
        self.current = StepId()
        self._settings = TrustConfig()
        self._useful_rates: list[tuple[int, float]] = []
        """From which entry on which share of the useful groups of a file is audited."""
        self._slots = SlotBook()
        self._due: deque[Due] = deque()
        self._version = -1
        self._recalled: set[int] = set()
        self._manifests: dict[int, str] = {}
        """Of the last versions."""

    def take(self, seq: int, kind: str, body: Body) -> Iterator[Finding]:
        """What does not hold about this entry, or about one that is missing before it."""
        while self._due and kind != self._due[0].kind:
            due = self._due.popleft()
            yield Finding(seq, f"a {due.kind} entry is missing before it: entry {due.cause} calls for one")
        if self._due:
            due = self._due.popleft()
            for difference in due.differences(body):
                yield Finding(seq, f"{difference}: entry {due.cause} calls for it")
            return
        yield from self._handle(seq, kind, body)

    def finish(self, seq: int) -> Iterator[Finding]:
        """What is missing at the end."""
        for due in self._due:
            yield Finding(seq, f"a {due.kind} entry is missing after it: entry {due.cause} calls for one")

    def balances(self) -> dict[str, dict[str, int]]:
        return {
            key: {"held": account.held, "released": account.released, "slashed": account.slashed}
            for key, account in self.accounts.items()
            if account.held or account.released or account.slashed
        }

    def _handle(self, seq: int, kind: str, body: Body) -> Iterator[Finding]:
        if kind == "verdict":
            yield from self._verdict(seq, body)
        elif kind == "slash":
            yield from self._owner_slash(seq, body)
        elif kind in CONSEQUENCES:
            yield Finding(seq, f"nothing calls for this {kind} entry")
        elif kind == "unban":
            yield from self._unban(seq, body)
        elif kind == "terms":
            self._settings = TrustConfig.model_validate(body["trust"])
            self._slots.set_terms(body["slot_tokens"], body["async_level"])
            training = TrainingConfig(groups_per_step=body["groups_per_step"])
            self._useful_rates.append((seq + 1, unaudited.useful_rate(training, self._settings)))
        elif kind == "commitment":
            self._slots.begin(step_of(body))
        elif kind == "version":
            yield from self._publish(seq, body)
        elif kind == "recorded":
            yield from self._record(seq, body)
        elif kind == "recalled":
            yield from self._recall(seq, body)
        elif kind == "rewound":
            yield from self._rewind(seq, body)

    def _account(self, key: str) -> Account:
        return self.accounts.setdefault(key, Account())

    def _verdict(self, seq: int, body: Body) -> Iterator[Finding]:
        self.verdicts += 1
        account, reasons = self._account(body["worker"]), [Reason(reason) for reason in body["reasons"]]
        event = trust.event_of(body["accepted"], bool(body["audited"]), reasons)
        if event is None:
            yield Finding(seq, "a fault of a validator is no verdict")
            return
        yield from self._check_audit(seq, account, body)
        usable = trust.is_usable(account.record, self._settings)
        yield from self._slots.take_verdict(seq, body, usable=usable, current=self.current)
        if body["accepted"]:
            self._pay(seq, body)
        if body["use"] != "further" and body["use"] != "late":
            self._move(seq, account, event, len(body["audited"]) / body["groups"])
        if account.record.state == "banned" and event == "proof":
            self._ban(seq, body["worker"], "verdict", public_reason(f"{', '.join(reasons)}: "))
        elif body["audited"]:
            self._add_drift(seq, account, body)

    def _check_audit(self, seq: int, account: Account, body: Body) -> Iterator[Finding]:
        """An audit that was drawn is done, and drawn at no lower rate than the record of the key allows."""
        if body["position"] > seq:
            yield Finding(seq, f"the file arrived after entry {body['position'] - 1}, which follows its verdict")
        rate = account.rate_at(body["position"])
        if body["audit_rate"] < rate - ROUNDING:
            yield Finding(seq, f"the audit rate is {body['audit_rate']:g}, the record of the key calls for {rate:g}")
        least = _rate_at(self._useful_rates, body["position"], 0.0)
        if body["useful_rate"] < least - ROUNDING:
            yield Finding(seq, f"{body['useful_rate']:g} of the useful groups are audited, the terms say {least:g}")
        if body["accepted"] and not set(body["audit_drawn"]) <= set(body["audited"]):
            yield Finding(seq, "the file was accepted without the audit that was drawn")

    def _pay(self, seq: int, body: Body) -> None:
        """The credit that follows from an accepted file."""
        if body["use"] == "confirmed":
            return
        earned = body["tokens"] if body["use"] == "counts" else 0
        if body["use"] == "further" and (payer := self._slots.counting(body)) is not None:
            earned = credit.share(payer.tokens, body["files"], self._account(payer.worker).held)
            self._book(seq, payer.worker, -earned, 0)
        held, released = credit.split_credit(self._account(body["worker"]).held, earned, self._settings.stake_tokens)
        self._book(seq, body["worker"], held, released)

    def _book(self, seq: int, key: str, held: int, released: int) -> None:
        account = self._account(key)
        account.held, account.released = account.held + held, account.released + released
        self._due.append(Due("credit", key, {"held": held, "released": released}, seq))

    def _move(self, seq: int, account: Account, event: trust.TrustEvent, share: float = 1.0) -> None:
        account.record = trust.after(account.record, event, self._settings, share)
        rate = trust.audit_rate(account.record, self._settings)
        if not account.rates or account.rates[-1][1] != rate:
            account.rates.append((seq + 1, rate))

    def _add_drift(self, seq: int, account: Account, body: Body) -> None:
        if account.record.state == "banned":
            return
        before, account.drift = account.drift, body["drift"]
        if account.drift == "cheating":
            self._ban(seq, body["worker"], "drift", public_reason(f"{Reason.SAMPLING_DRIFT}: "))
        elif before == "honest" and account.drift == "suspicious":
            self._move(seq, account, "anomaly")

    def _ban(self, seq: int, key: str, cause: str, reason: str) -> None:
        account = self._account(key)
        self._due.append(Due("slash", key, {"held": -account.held, "slashed": account.held}, seq))
        self._due.append(Due("ban", key, {"by": cause}, seq, reason))
        account.slashed, account.held = account.slashed + account.held, 0
        account.record = trust.TrustRecord("banned", account.record.clean_audits, account.record.anomalies)
        account.rates.append((seq + 1, 1.0))
        self._slots.withdraw(key)

    def _owner_slash(self, seq: int, body: Body) -> Iterator[Finding]:
        """A ban by the owner begins with its slash."""
        key = body["worker"]
        if self._account(key).record.state == "banned":
            yield Finding(seq, "the key is banned already")
        self._ban(seq, key, "owner", "by the owner: ")
        for difference in self._due.popleft().differences(body):
            yield Finding(seq, f"{difference}: a ban takes all that is held")

    def _unban(self, seq: int, body: Body) -> Iterator[Finding]:
        account = self._account(body["worker"])
        if account.record.state != "banned":
            yield Finding(seq, "the key is not banned")
        self._move(seq, account, "unbanned")
        account.drift = "honest"

    def _publish(self, seq: int, body: Body) -> Iterator[Finding]:
        number = body["version"]
        if number != self._version + 1 or number > self.current.step or body["epoch"] != self.current.epoch:
            yield Finding(seq, f"version {number} does not follow version {self._version} and its batches")
        self._version, self._manifests[number] = number, body["manifest"]
        self._manifests.pop(number - REMEMBERED_STEPS, None)

    def _record(self, seq: int, body: Body) -> Iterator[Finding]:
        step = step_of(body)
        again = step.step in self._recalled
        self._recalled.discard(step.step)
        if step != self.current and not again:
            yield Finding(seq, f"the batch of step {step} is recorded while step {self.current} is the current one")
        yield from self._slots.consume(seq, step, body["groups"])
        self.current = max(self.current, step.next())

    def _recall(self, seq: int, body: Body) -> Iterator[Finding]:
        """A batch that diverged is recorded again without what an audit rejects; only one whose version is not out."""
        if body["step"] < self._version or body["epoch"] != self.current.epoch or not self._slots.restore(body["step"]):
            yield Finding(seq, f"the batch of step {body['step']} is recalled, which was not recorded or is trained on")
        self._recalled.add(body["step"])

    def _rewind(self, seq: int, body: Body) -> Iterator[Finding]:
        """The next epoch begins with a version that was published; nobody loses credit, and no group of before is used again."""
        first, number = step_of(body), body["version"]
        if first != StepId(self.current.epoch + 1, number, 0):
            yield Finding(
                seq, f"a rewind to version {number} begins step {first}, the epoch before is {self.current.epoch}"
            )
        if number > self._version:
            yield Finding(seq, f"a rewind to version {number}, which is not published")
        if self._manifests.get(number, body["manifest"]) != body["manifest"]:
            yield Finding(seq, f"a rewind to version {number}, which has another manifest than this one")
        self._slots.rewind(seq, max(first, self.current))
        self._manifests = {known: digest for known, digest in self._manifests.items() if known <= number}
        self._recalled.clear()
        self.current, self._version = first, number
