"""How far a key is trusted, and which groups of its submissions are audited: pure rules over its record.

A key that only registered has done nothing yet; with its first request for work it is on probation and audited in full. Clean
audits make it active and let the audit rate fall like 1/n to a floor. An anomaly makes a key suspect; several quarantine it: its
work is verified but not used until clean work leads out. A proof bans for good.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blake3 import blake3

from shoal.config import ShoalConfig, TrustConfig
from shoal.errors import ConfigError
from shoal.protocol.api import WorkerState
from shoal.protocol.verdicts import Reason, Severity, most_severe

TrustEvent = Literal["asked", "clean_audit", "clean_pass", "anomaly", "proof", "silent", "returned", "unbanned"]

ANOMALIES_TO_QUARANTINE = 3
DETECTION_POWER = 0.99
"""Share of cheated submissions that an audit finds, as calibration measures it."""


@dataclass(frozen=True)
class TrustRecord:
    state: WorkerState
    clean_audits: float = 0.0
    """In whole submissions: an audit of half of a submission's groups counts as half."""
    anomalies: int = 0


def event_of(accepted: bool, audited: bool, reasons: Sequence[Reason]) -> TrustEvent | None:
    """What a verdict means for its key; none for a fault, for which the key is not penalised."""
    if accepted:
        return "clean_audit" if audited else "clean_pass"
    severity = most_severe(list(reasons))
    if severity in (Severity.FAULT, None):
        return None
    return "proof" if severity is Severity.PROOF else "anomaly"


def after(record: TrustRecord, event: TrustEvent, config: TrustConfig, audited_share: float = 1.0) -> TrustRecord:
    """The record after one event. Bans stick: only the owner's unban leaves them."""
    if record.state == "banned":
        return TrustRecord("probation") if event == "unbanned" else record
    if event == "proof":
        return replace(record, state="banned")
    if event == "anomaly":
        anomalies = record.anomalies + 1
        state: WorkerState = "quarantined" if anomalies >= ANOMALIES_TO_QUARANTINE else "suspect"
        return TrustRecord(state, 0.0, anomalies)
    if event == "clean_audit":
        return _after_clean_audit(record, config, audited_share)
    if event == "asked" and record.state == "registered":
        return replace(record, state="probation")
    if event == "silent":
        return replace(record, state="gone")
    if event == "returned" and record.state == "gone":
        return replace(record, state=earned_state(record, config))
    return record


def _after_clean_audit(record: TrustRecord, config: TrustConfig, audited_share: float) -> TrustRecord:
    record = replace(record, clean_audits=record.clean_audits + audited_share)
    if not _is_proven(record, config):
        return record
    # A clean run of full length forgives one anomaly at a time.
    left = max(record.anomalies - 1, 0)
    record = replace(record, anomalies=left, clean_audits=0.0 if left else record.clean_audits)
    # A key that is gone returns with what it has earned: its record follows from its verdicts alone.
    return record if record.state == "gone" else replace(record, state=earned_state(record, config))


def earned_state(record: TrustRecord, config: TrustConfig) -> WorkerState:
    """The state that follows from the record, whether its key is present or gone: silence neither helps nor harms."""
    if record.state == "banned":
        return "banned"
    if record.anomalies >= ANOMALIES_TO_QUARANTINE:
        return "quarantined"
    if record.anomalies:
        return "suspect"
    return "active" if _is_proven(record, config) else "probation"


def _is_proven(record: TrustRecord, config: TrustConfig) -> bool:
    """Thirds of a submission add up to whole ones."""
    return record.clean_audits >= config.probation_audits - 1e-6


def is_usable(record: TrustRecord, config: TrustConfig) -> bool:
    """Whether accepted work enters batches and earns credit."""
    return earned_state(record, config) not in ("quarantined", "banned")


def audit_rate(record: TrustRecord, config: TrustConfig) -> float:
    if record.state != "active":
        return 1.0
    return max(config.audit_floor, config.probation_audits / max(record.clean_audits, 1))


def audited_groups(step_secret: bytes, submission_digest: str, rate: float, groups: int) -> tuple[int, ...]:
    """A draw that cannot be predicted, and that anyone can repeat once the step's secret is published.

    Each group is drawn by itself: that costs as many audited tokens as drawing whole files, but a key that forges every group
    loses one to the draw after 1 / rate groups instead of 1 / rate files.

    The step is the one that was current when the file arrived: its batch is not formed yet, so its secret is not public. The
    step of the lease would not do, because a file may come late, after that step's secret.
    """
    draws = _draws(step_secret, submission_digest, groups)
    return tuple(group for group, draw in enumerate(draws) if draw < rate * 2.0**64)


def audit_order(step_secret: bytes, submission_digest: str, groups: int) -> tuple[int, ...]:
    """All groups of a file, those first that a higher rate would draw first."""
    draws = _draws(step_secret, submission_digest, groups)
    return tuple(sorted(range(groups), key=lambda group: draws[group]))


def rounding(step_secret: bytes, submission_digest: str) -> float:
    """A coin in [0, 1) of the same kind, which rounds how many groups are audited beyond the draw."""
    noise = blake3(b"rounding" + bytes.fromhex(submission_digest), key=step_secret).digest(8)
    return int.from_bytes(noise, "big") / 2.0**64


def _draws(step_secret: bytes, submission_digest: str, groups: int) -> list[int]:
    noise = blake3(b"audit" + bytes.fromhex(submission_digest), key=step_secret).digest(8 * groups)
    return [int.from_bytes(noise[8 * group : 8 * group + 8], "big") for group in range(groups)]


def groups_to_audit(
    drawn: Sequence[int], order: Sequence[int], useful: Collection[int], limits: Sequence[int]
) -> list[int]:
    """The drawn groups and further useful ones, until no more useful ones stay without an audit than `limits` says for
    their number; where it says nothing, all may."""
    limit = limits[len(useful)] if len(useful) < len(limits) else len(useful)
    others = [group for group in order if group in useful and group not in drawn]
    return sorted([*drawn, *others[: max(0, len(others) - limit)]])


@dataclass(frozen=True)
class LossRule:
    """Cheating must lose in expectation: q·d·stake > (1 − q·d)·gain.

    Groups are drawn one by one. Cheating in m of them gains m(1 − q·d)^m against a loss of 1 − (1 − q·d)^m, whose ratio falls with
    m: what must not pay is to cheat in one group.
    """

    audit_rate: float
    detection_power: float
    stake_tokens: int
    gain_tokens: int

    @classmethod
    def of(cls, config: ShoalConfig) -> "LossRule":
        """The rule at the audit floor; the gain of a cheat is all the tokens of a group."""
        settings, rollouts = config.trust, config.rollouts
        gain = rollouts.group_size * rollouts.max_new_tokens
        return cls(settings.audit_floor, DETECTION_POWER, settings.stake_tokens, gain)

    def require(self) -> None:
        if not self.holds:
            raise ConfigError(
                f"With these settings cheating would pay: {self}.",
                hint=f"Raise trust.stake_tokens to {self.smallest_stake()} or more, or trust.audit_floor.",
            )

    @property
    def expected_loss(self) -> float:
        return self.audit_rate * self.detection_power * self.stake_tokens

    @property
    def expected_gain(self) -> float:
        return (1 - self.audit_rate * self.detection_power) * self.gain_tokens

    @property
    def holds(self) -> bool:
        return self.expected_loss > self.expected_gain

    def smallest_stake(self) -> int:
        caught = self.audit_rate * self.detection_power
        return math.floor((1 - caught) / caught * self.gain_tokens) + 1 if caught else 0

    def __str__(self) -> str:
        return (
            f"audit rate {self.audit_rate:g} × detection {self.detection_power:g} × stake {self.stake_tokens} tokens"
            f" = {self.expected_loss:.0f} against a gain of {self.expected_gain:.0f} per cheated group"
        )
