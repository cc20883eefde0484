"""A scenario: who takes part, how fast everything is, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import ShoalConfig
from shoal.files import digest_bytes
from shoal.simulation.actors import Trainer, Validator, Work
from shoal.simulation.clock import EventClock
from shoal.simulation.coordinator import LocalCoordinator
from shoal.simulation.operations import MakeCoordinator, Operations
from shoal.simulation.workers import Behaviour, Worker, World

SWEEP_S = 1.0
HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class WorkerPlan:
    name: str
    speed: float = 1.0
    pauses: tuple[float, float] | None = None
    """Interval and length in seconds."""
    behaviour: Behaviour | None = None
    """Honest if there is none."""


@dataclass(frozen=True)
class Scenario:
    config: ShoalConfig
    workers: Sequence[WorkerPlan]
    work: Work
    steps: int
    train_s: float = 1.0
    validators: int = 2
    validate_s: float = 0.2
    longest_s: float = 20_000.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """From the start until the last batch was formed."""
    formed_at: Sequence[float]
    """Since the start, one for each batch."""
    lengths: Sequence[float]
    """Tokens per group of each slot that was trained on."""
    rewards: Sequence[float]
    """Of the first sample of each trained group."""
    ages: Sequence[int] = ()
    """Of each trained group: its step − the version that made it."""

    @property
    def mean_age(self) -> float:
        return sum(self.ages) / len(self.ages)

    @property
    def steps_per_minute(self) -> float:
        return 60 * len(self.formed_at) / self.seconds


def simulate(scenario: Scenario, make: MakeCoordinator = LocalCoordinator) -> Outcome:
    clock = EventClock()
    coordinator = make(scenario.config, clock, digest_secret(scenario.seed))
    world = World(coordinator, clock, Trainer(coordinator, clock, scenario.train_s), scenario.work)
    for number in range(scenario.validators):
        Validator(coordinator, clock, scenario.work, world.junk, f"validator-{number}", scenario.validate_s)
    for plan in scenario.workers:
        Worker(world, plan.name, speed=plan.speed, pauses=plan.pauses, behaviour=plan.behaviour)
    _keep_house(world)
    begun = clock()
    clock.run(lambda: len(world.trainer.formed_at) >= scenario.steps, scenario.longest_s)
    formed_at = [at - begun for at in world.trainer.formed_at[: scenario.steps]]
    outcome = _outcome(coordinator, formed_at, clock() - begun)
    coordinator.close()
    return outcome


def digest_secret(seed: int) -> bytes:
    """A secret of its own for each seed; a real run takes one that nobody can know."""
    return bytes.fromhex(digest_bytes(f"simulation {seed}".encode()))


def _keep_house(world: World) -> None:
    def sweep() -> None:
        world.coordinator.maintain()
        world.clock.after(SWEEP_S, sweep)

    def beat() -> None:
        world.coordinator.beat(world.keys)
        world.clock.after(HEARTBEAT_S, beat)

    sweep()
    beat()


def _outcome(coordinator: Operations, formed_at: Sequence[float], seconds: float) -> Outcome:
    batches = [(step, coordinator.trained(step)) for step in range(len(formed_at))]
    groups = [group for _, batch in batches for group in batch]
    return Outcome(
        seconds=formed_at[-1] if formed_at else seconds,
        formed_at=formed_at,
        lengths=list({group.submission_id: group.tokens for group in groups}.values()),
        rewards=[group.reward for group in groups],
        ages=[step - group.version for step, batch in batches for group in batch],
    )
