"""Swarms on an event clock: the coordinator's own code, with made-up workers, validators and a trainer around it."""

from shoal.simulation.actors import Work
from shoal.simulation.attacks import attacks, honest, hostile, unequal
from shoal.simulation.clock import EventClock
from shoal.simulation.coordinator import LocalCoordinator
from shoal.simulation.memory.coordinator import MemoryCoordinator
from shoal.simulation.scenario import Outcome, Scenario, WorkerPlan, simulate
from shoal.simulation.workers import Behaviour

__all__ = [
    "Behaviour",
    "EventClock",
    "LocalCoordinator",
    "MemoryCoordinator",
    "Outcome",
    "Scenario",
    "Work",
    "WorkerPlan",
    "attacks",
    "honest",
    "hostile",
    "simulate",
    "unequal",
]
