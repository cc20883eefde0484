"""Runs a scenario: builds the actors, lets the clock go until the last step is trained, and returns what came of it.

The same scenario gives the same numbers, on every machine. A swarm that makes no progress for long is stopped, with the reason.
"""

import gc
from collections.abc import Callable

from shoal.simulation.clock import EventClock
from shoal.simulation.memory.coordinator import MemoryCoordinator
from shoal.simulation.operations import MakeCoordinator
from shoal.simulation.scenario import SWEEP_S, digest_secret
from shoal.simulation.swarm.idle import Idle
from shoal.simulation.swarm.links import Broadcast
from shoal.simulation.swarm.members import Member
from shoal.simulation.swarm.owners import SwarmTrainer, Validators
from shoal.simulation.swarm.result import SwarmResult, summarise
from shoal.simulation.swarm.spec import SwarmSpec
from shoal.simulation.swarm.standstill import PATIENCE, Standstill, most_events, sentence
from shoal.simulation.swarm.work import Workload
from shoal.simulation.swarm.world import Counted, World

WARM_UP = 8
"""Steps that do not count, or a quarter of a shorter run, at least one: probation, first pace, three cycles for leases in time."""

COLLECT_AFTER = 200_000
"""Files. Slots of steps that are over are taken apart; only those that somebody still works on then are left for a collection."""


class Swarm:
    def __init__(self, spec: SwarmSpec, make: MakeCoordinator = MemoryCoordinator, *, parks: bool = True) -> None:
        self.spec, config, clock = spec, spec.config(), EventClock()
        coordinator = make(config, clock, digest_secret(spec.run.seed))
        if isinstance(coordinator, MemoryCoordinator):
            coordinator.leasing.late.has_backups = spec.coordinator.backups
        self.world = World(spec, config, clock, coordinator, Workload(spec.work, config), Broadcast(spec))
        if parks and isinstance(coordinator, MemoryCoordinator):
            clock.crowd = idle = Idle(self.world, coordinator)
            self.world.park = idle.park
        self.begun_at = clock.now
        self.trainer, self.validators = SwarmTrainer(self.world), Validators(self.world)
        self.world.on_file, self.world.on_verdict = self.validators.look, self.trainer.look
        groups = [(group, number) for group, one in enumerate(spec.workers) for number in range(one.count)]
        self.members = [Member(self.world, group, number) for group, number in groups]
        self.warm_up = max(1, min(WARM_UP, spec.run.steps // 4))
        self.before, self.measured_from = Counted(), clock.now
        self.collected_at = 0.0
        self.stopped = ""
        """Why, if it did not reach its last step."""

    def run(self, on_progress: Callable[[float], None] = lambda share: None) -> SwarmResult:
        was_enabled = gc.isenabled()
        gc.freeze()  # the machines of the swarm stay: no collection needs to look at them,
        gc.disable()  # and a step leaves hardly anything behind that only a collection would find
        try:
            return self._run(on_progress)
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def _run(self, on_progress: Callable[[float], None]) -> SwarmResult:
        self._sweep()
        self.world.beat()
        for step in range(1, self.spec.run.steps + 1):
            if not self._reach(step):
                break
            on_progress(step / self.spec.run.steps)
            self._collect()
            if step == self.warm_up:
                self._settle()
                self.before, self.measured_from = self.world.counted.copy(), self.world.clock.now
        self._settle()
        result = summarise(self)
        self.world.coordinator.close()
        return result

    def _reach(self, step: int) -> bool:
        """Lets time pass until the step is trained; false if the swarm makes no progress."""
        longest_s = PATIENCE * max(self.spec.trainer.step_s, self.world.config.coordinator.lease_s)
        before, began_at = self.world.counted.copy(), self.world.clock.now
        events = self.world.clock.run(lambda: self.trainer.step >= step, longest_s, most_events(self.spec.machines))
        is_reached = self.trainer.step >= step
        if not is_reached:
            self.stopped = sentence(self._standstill(self.world.counted - before, began_at, events))
        return is_reached

    def _standstill(self, counted: Counted, began_at: float, events: int) -> Standstill:
        honest = [member for member in self.members if member.spec.conduct == "honest" and not member.is_out]
        return Standstill(
            step=self.trainer.step,
            seconds=self.world.clock.now - began_at,
            events=events,
            most_events=most_events(self.spec.machines),
            versions_received=counted.bytes["worker_down"],
            tokens_generated=counted.tokens["generated"],
            tokens_late=counted.tokens["late"],
            tokens_lost=counted.tokens["lost"],
            files=sum(counted.files.values()),
            files_waiting=len(self.world.received_at),
            honest=len(honest),
            slot_s=min(self.world.workload.slot_s(group) for group in self.spec.workers),
            lease_s=self.world.config.coordinator.lease_s,
            stage_s=self.spec.trainer.stage_s,
            upload_s=min(self.world.workload.upload_s(group) for group in self.spec.workers),
            arrival_s=max(self.world.broadcast.seconds(group, 0, None) for group in range(len(self.spec.workers))),
            stays_s=max(group.stays_s for group in self.spec.workers)
            if all(group.stays_s for group in self.spec.workers)
            else 0.0,
        )

    def _sweep(self) -> None:
        self.world.coordinator.maintain()
        self.trainer.look()
        self.validators.look()
        self.world.clock.after(SWEEP_S, self._sweep)

    def _collect(self) -> None:
        files = sum(self.world.counted.files.values())
        if files - self.collected_at >= COLLECT_AFTER:
            self.collected_at = files
            gc.collect()

    def _settle(self) -> None:
        for member in self.members:
            member.settle()


def run_swarm(
    spec: SwarmSpec,
    on_progress: Callable[[float], None] = lambda share: None,
    make: MakeCoordinator = MemoryCoordinator,
) -> SwarmResult:
    return Swarm(spec, make).run(on_progress)
