"""Why a simulated swarm makes no progress, in one sentence: from what was generated, accepted, late and lost since its last step.

Every simulation ends: with its last step, after too much simulated time without a step, or after too many events within one.
"""

from dataclasses import dataclass

PATIENCE = 40.0
"""Leases, or training steps, after which a step that is not trained never will be."""
EVENTS, EVENTS_OF_A_WORKER, MOST_POLLING = 1_000_000, 100_000, 100
"""Within one step. An idle worker causes eight events per second, and a hundred or more of them 800 together (`rules.leases`), so
that everybody may wait for more than three hours. Ten thousand laptops have 700,000 events in a step of ten minutes."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """What happened since the last step that was trained."""

    step: int
    seconds: float
    events: int
    most_events: int
    versions_received: float
    tokens_generated: float
    tokens_late: float
    tokens_lost: float
    files: float
    """That arrived."""
    files_waiting: int
    """Without a verdict."""
    honest: int
    """Workers that are honest, and not banned."""
    slot_s: float
    """What the fastest class of workers takes for a slot, and ..."""
    upload_s: float
    """... the best connected one to deliver it."""
    lease_s: float
    stage_s: float
    """What the trainer takes to publish a version."""
    arrival_s: float
    """Of the first weights at the slowest class."""
    stays_s: float
    """How long workers stay at a time, in the class that stays longest; 0: for good."""


def most_events(machines: int) -> int:
    return EVENTS + EVENTS_OF_A_WORKER * min(machines, MOST_POLLING)


def sentence(seen: Standstill) -> str:
    return f"Stopped at step {seen.step}, after {_time(seen.seconds)} without another one: {_reason(seen)}."


def _reason(seen: Standstill) -> str:
    if seen.events >= seen.most_events:
        return f"{seen.events:,} events; times of this scenario are too far apart, or workers come and go too fast"
    if seen.stage_s >= seen.seconds:
        return f"the trainer takes {_time(seen.stage_s)} to publish a version; lower trainer.stage_s"
    if not seen.versions_received and not seen.tokens_generated:
        return _without_weights(seen)
    if not seen.honest:
        return "every worker is hostile or banned"
    if seen.files_waiting > seen.files / 2 > 0:
        return f"{seen.files_waiting} files wait for a verdict; validators are too slow"
    if not seen.tokens_generated:
        return "nobody was given work; requests wait for the coordinator, or its rules give none to these workers"
    if seen.tokens_lost > seen.tokens_late and not seen.files:
        return f"workers leave before a slot is done, which takes {_time(seen.slot_s)}"
    if not seen.files and seen.upload_s > seen.slot_s:
        return (
            f"the file of a slot takes {_time(seen.upload_s)} to upload and a lease lasts {_time(seen.lease_s)} at most; "
            "raise up_mbit_s of the workers, or coordinator.lease_s"
        )
    if not seen.files:
        return (
            f"a slot takes {_time(seen.slot_s)} and a lease lasts {_time(seen.lease_s)} at most; "
            "raise coordinator.lease_s, or make slots smaller with rollouts.tasks_per_slot"
        )
    return "what was accepted never filled a batch; look at work.useful_share and at what came late or was lost"


def _without_weights(seen: Standstill) -> str:
    reason = f"no worker has weights; the first ones take {_time(seen.arrival_s)} to arrive"
    return f"{reason}, and workers leave after {_time(seen.stays_s)}" if 0 < seen.stays_s < seen.arrival_s else reason


def _time(seconds: float) -> str:
    for unit_s, unit in ((2 * 86_400, "days"), (7200, "h"), (180, "min")):
        if seconds >= unit_s:
            size = {"days": 86_400, "h": 3600, "min": 60}[unit]
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"
