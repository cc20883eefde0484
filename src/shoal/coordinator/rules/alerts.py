"""What deserves the owner's attention: one table of alerts with their thresholds, and a pure check of each.

Readings of the last steps go in; the alerts that hold come out, each with what was seen and what to do. Training quantities are
compared over windows, so that one noisy step raises nothing; an alert goes when its condition does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from shoal.metrics.units import size

WINDOW = 8
"""Steps that are compared with the same number before them."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """What the trainer reported of one step; none where it was not measured."""

    step: int
    reward: float | None = None
    entropy: float | None = None
    divergence: float | None = None
    truncation: float | None = None
    repetition: float | None = None
    audited: float | None = None
    """Share of trained tokens whose log-probabilities a validator computed."""


@dataclass(frozen=True, slots=True)
class HeldoutReading:
    version: int
    accuracy: float
    margin: float
    """Half of the 95 % interval."""


@dataclass(frozen=True, slots=True)
class Readings:
    """The run as it is now. Times are in seconds."""

    steps: Sequence[StepReading] = ()
    """Oldest first."""
    heldout: Sequence[HeldoutReading] = ()
    newest_version: int = -1
    version_age_s: float = 0.0
    version_users: int = 0
    """Workers that were leased the newest version."""
    version_grace_s: float = 60.0
    """How long a version may take to reach workers."""
    workers: int = 0
    oldest_pending_s: float = 0.0
    claimed_lately: bool = True
    """Whether a validator asked for work lately."""
    disk_free_bytes: int | None = None
    disk_needed_bytes: int = 0
    """Below this the coordinator takes no work."""
    is_running: bool = True


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    threshold: float
    means: str
    advice: str


@dataclass(frozen=True, slots=True)
class Raised:
    alert: Alert
    seen: str


ALERTS: tuple[Alert, ...] = (
    Alert("divergence", 0.1, "Trainer and rollout policy differ by more than this per token (k3), median of 3 steps.",
          "Lower training.async_level or training.learning_rate; drain the run if it grows."),
    Alert("divergence_unseen", 8.0, "This many steps in a row had no audited group: the guards against divergence see nothing.",
          "Raise trust.audit_floor or training.groups_per_step, so that every batch has audited groups."),
    Alert("entropy_collapse", 0.1, "Entropy fell below this share of what it was in the first steps.",
          "Lower training.learning_rate or raise training.kl_beta; look at recent completions for copies."),
    Alert("truncation_rising", 0.1, "The share of cut completions rose by more than this over a window.",
          "Raise rollouts.max_new_tokens or give a length target; look at completions that were cut."),
    Alert("repetition_rising", 0.1, "The share of completions that repeat themselves rose by more than this.",
          "Look at recent completions; lower training.learning_rate or go back to an earlier checkpoint."),
    Alert("reward_without_heldout", 0.1, "Reward rose by more than this while held-out accuracy did not.",
          "The policy may exploit the verifier: read completions with full reward before training on."),
    Alert("version_unused", 3.0, "No worker uses the newest version after this many times the usual delay.",
          "Check origin and relays: `shoal logs`, bytes sent, and whether workers reach them."),
    Alert("no_validator", 60.0, "A submission waits for longer than this, and no validator asks for work. Seconds.",
          "Start a validator with `shoal validate`, or see why it stopped: `shoal logs validator`."),
    Alert("disk_low", 4.0, "Free space is below this many times what the coordinator needs to take work.",
          "Free space, or lower coordinator.keep_rollouts_s."),
)  # fmt: skip
BY_NAME = {alert.name: alert for alert in ALERTS}


def check(readings: Readings) -> list[Raised]:
    """The alerts that hold, in the order of the table."""
    found = [(alert, CHECKS[alert.name](readings, alert.threshold)) for alert in ALERTS]
    return [Raised(alert, seen) for alert, seen in found if seen]


def _divergence(readings: Readings, limit: float) -> str:
    last = _values(readings, "divergence")[-3:]
    return f"{median(last):.3g} per token" if len(last) == 3 and median(last) > limit else ""


def _unseen(readings: Readings, steps: float) -> str:
    last = _values(readings, "audited")[-int(steps) :]
    return f"no audited group in the last {len(last)} steps" if len(last) == steps and not any(last) else ""


def _entropy(readings: Readings, share: float) -> str:
    values = _values(readings, "entropy")
    if len(values) < 2 * WINDOW:
        return ""
    first, last = fmean(values[:WINDOW]), fmean(values[-WINDOW:])
    return f"{last:.3g}, {first:.3g} at first" if first > 0 and last < share * first else ""


def _rise(name: str) -> Callable[[Readings, float], str]:
    def check_rise(readings: Readings, limit: float) -> str:
        before, after = _windows(_values(readings, name))
        return f"{before:.0%} before, {after:.0%} now" if after - before > limit else ""

    return check_rise


def _reward_alone(readings: Readings, limit: float) -> str:
    if len(readings.heldout) < 2:
        return ""
    last = readings.heldout[-1]
    earlier = [one for one in readings.heldout if one.version <= last.version - WINDOW]
    if not earlier:
        return ""
    before = earlier[-1]
    rewards = {one.step: one.reward for one in readings.steps if one.reward is not None}
    then, now = _around(rewards, before.version), _around(rewards, last.version)
    if then is None or now is None or now - then <= limit:
        return ""
    gained = last.accuracy - before.accuracy
    if gained > max(0.0, limit / 4, last.margin / 4):
        return ""
    return f"reward {then:.2f} to {now:.2f}, held-out {before.accuracy:.2f} to {last.accuracy:.2f}"


def _unused(readings: Readings, times: float) -> str:
    is_stuck = readings.workers > 0 and readings.newest_version >= 0 and readings.version_users == 0
    late = readings.version_age_s > times * readings.version_grace_s
    if not (readings.is_running and is_stuck and late):
        return ""
    return f"version {readings.newest_version} is {readings.version_age_s:.0f} s old, no worker has it"


def _unvalidated(readings: Readings, limit_s: float) -> str:
    waits = readings.oldest_pending_s > limit_s and not readings.claimed_lately
    return f"a submission waits for {readings.oldest_pending_s:.0f} s" if waits else ""


def _disk(readings: Readings, times: float) -> str:
    free = readings.disk_free_bytes
    return f"{size(free)} free" if free is not None and free < times * readings.disk_needed_bytes else ""


def _values(readings: Readings, name: str) -> list[float]:
    return [value for one in readings.steps if (value := getattr(one, name)) is not None]


def _windows(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2 * WINDOW:
        return 0.0, 0.0
    return fmean(values[-2 * WINDOW : -WINDOW]), fmean(values[-WINDOW:])


def _around(rewards: dict[int, float], version: int) -> float | None:
    """Mean reward of the steps next to a version."""
    near = [reward for step, reward in rewards.items() if abs(step - version) <= WINDOW // 2]
    return fmean(near) if near else None


CHECKS: dict[str, Callable[[Readings, float], str]] = {
    "divergence": _divergence,
    "divergence_unseen": _unseen,
    "entropy_collapse": _entropy,
    "truncation_rising": _rise("truncation"),
    "repetition_rising": _rise("repetition"),
    "reward_without_heldout": _reward_alone,
    "version_unused": _unused,
    "no_validator": _unvalidated,
    "disk_low": _disk,
}
"""What each alert looks at: readings and threshold in, what was seen out, empty if it does not hold."""
