"""The state of a run: what its owner asked for, and whether that has happened. Pure."""

from dataclasses import dataclass

from shoal.protocol.api import OwnerState, RunState


@dataclass(frozen=True, slots=True)
class RunView:
    wanted: OwnerState
    steps: int
    step: int
    newest_version: int
    """−1 before the first."""
    leases_outstanding: int
    submissions_pending: int


@dataclass(frozen=True, slots=True)
class RunClock:
    """Time since the start of a run, without the times in which no coordinator ran."""

    started_at: float
    stops: tuple[tuple[float, float], ...] = ()

    def at_s(self, at: float) -> float:
        stopped = sum(min(at, end) - begin for begin, end in self.stops if begin < at)
        return at - self.started_at - stopped


def run_state(view: RunView) -> RunState:
    if view.newest_version >= view.steps:
        return "finished"
    return "drained" if view.wanted == "draining" and _is_drained(view) else view.wanted


def _is_drained(view: RunView) -> bool:
    """Nothing is leased, unverified, or in a batch that no version follows from yet."""
    return view.newest_version == view.step and not view.leases_outstanding and not view.submissions_pending


def oldest_needed_step(step: int, async_level: int, oldest_checkpoint: int) -> int:
    """Rollout files of earlier steps are not needed: no batch will hold their groups, and none with them is repeated."""
    return min(step - async_level, oldest_checkpoint)
