"""Watches the roles of one host and the run that they serve, until the run is over or cannot end any more."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.config import ShoalConfig
from shoal.errors import UnavailableError
from shoal.host.supervisor import PERMANENT_EXIT_CODES, RoleEvent, Supervisor
from shoal.observe import LiveView, startup_notice
from shoal.protocol.api import HistoryView, StatusView
from shoal.protocol.client import CoordinatorClient

POLL_INTERVAL_S = 0.5
STATUS_DEADLINE_S = 1.0
FINISH_DEADLINE_S = 120.0
"""How long the demo's last evaluation may take once the last version is published."""
LEAVE_DEADLINE_S = 30.0
"""How long workers may take to hear that the run is over."""


@dataclass
class Watch:
    """Shows a run until its last version is measured; ends with one sentence when that cannot happen any more."""

    config: ShoalConfig
    supervisor: Supervisor
    view: LiveView
    client: CoordinatorClient
    workers: Sequence[str] = ()
    """The workers of this host."""
    needs_workers: bool = False
    """Whether the run ends with the last of them: nobody else will come."""
    finish_deadline_s: float | None = FINISH_DEADLINE_S
    """None waits for the last evaluation as long as its evaluator lives: that of a large model takes its time."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    restarts: int = 0
    _ended: list[str] = field(default_factory=list)
    """Roles that have ended for good."""
    _finished_at: float | None = None

    def run(self) -> tuple[StatusView, HistoryView]:
        self.view.wait("the coordinator is starting")
        while True:
            self._note_role_events()
            try:
                status, history = self.client.status(), self.client.history()
            except UnavailableError:
                self.view.wait(f"the coordinator at {self.client.url} does not answer yet")
                continue  # the client has waited
            self.view.update(status, history)
            if notice := startup_notice(status, self.workers, self._ended):
                self.view.wait(notice)
            if any(evaluation.version >= self.config.run.steps for evaluation in history.evaluations):
                return status, history
            if status.run_state == "drained" and "trainer" not in self.supervisor.alive:
                return status, history
            self._fail_if_stuck(status)
            self.sleep(POLL_INTERVAL_S)

    def wait_for_workers(self) -> None:
        """Until every worker has heard that the run is over and has left, or is too busy to ask."""
        until = self.clock() + LEAVE_DEADLINE_S
        while self.clock() < until:
            self._note_role_events()
            own = {name for name in self.workers if name in self.supervisor.alive}
            if not own and not self._strangers():
                return
            self.sleep(POLL_INTERVAL_S)

    def _strangers(self) -> list[str]:
        """Workers of other hosts that sent a heartbeat lately."""
        recent_s = 2 * self.config.coordinator.heartbeat_s
        present = [view for view in self.client.status().workers if view.state not in ("banned", "gone")]
        return [view.name for view in present if view.last_seen_s <= recent_s and view.name not in self.workers]

    def _note_role_events(self) -> None:
        for event in self.supervisor.poll():
            self.restarts += event.kind == "restarted"
            if event.kind == "failed":
                self._ended.append(event.role)
                self.view.ended(event.role, event.last_line or event.detail)
            elif _noteworthy(event):
                self.view.note(event.text, "warn")

    def _fail_if_stuck(self, status: StatusView) -> None:
        logs = self.config.run.dir / "logs"
        if status.run_state != "finished":
            if self.needs_workers and not set(self.workers) & set(self.supervisor.alive):
                raise UnavailableError("No honest worker is left.", hint=f"See {logs / self.workers[0]}.log.")
            return
        if self._finished_at is None:
            self._finished_at = self.clock()
        if self.finish_deadline_s is not None and self.clock() - self._finished_at > self.finish_deadline_s:
            raise UnavailableError(
                f"The evaluator did not measure the last version within {self.finish_deadline_s:.0f} s.",
                hint=f"See {logs / 'evaluator.log'}.",
            )


def _noteworthy(event: RoleEvent) -> bool:
    """Restarts and the exits that lead to them."""
    final = event.exit_code in (0, None, *PERMANENT_EXIT_CODES)
    return event.kind == "restarted" or (event.kind == "exited" and not final)
