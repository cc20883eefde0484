"""Swarms of thousands of workers with engines and links: what a scenario file describes, run on the event clock."""

from shoal.simulation.swarm.driver import run_swarm
from shoal.simulation.swarm.result import SwarmResult
from shoal.simulation.swarm.spec import SwarmSpec, load_scenario

__all__ = ["SwarmResult", "SwarmSpec", "load_scenario", "run_swarm"]
