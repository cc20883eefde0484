"""The loop that warm starts and reward models share: scheduled AdamW with clipped gradients and checkpoints.

What a step learns is a function of its number, so a run that was killed goes on from its last checkpoint and ends with the same
weights, bit for bit. `plan.json` binds a directory to data and settings; another plan is refused, never mixed in.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.rundir import checkpoints_of
from shoal.training import Checkpoints, DivergedError, World
from shoal.training.model.distributed import clip_gradients

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class FitSettings:
    epochs: int = 1
    batch: int = 64
    """Examples of one optimiser step."""
    learning_rate: float = 1e-5
    warmup_steps: int = 20
    final_share: float = 0.05
    """Where the cosine ends, as a share of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    shuffle: bool = True
    """Without it the order of the examples is the curriculum."""
    seed: int = 0


@dataclass(frozen=True)
class FitReport:
    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float


def step_order(count: int, settings: FitSettings) -> Iterator[list[int]]:
    """For each optimiser step the examples that it learns; every epoch sees each once, in a new order."""
    for epoch in range(settings.epochs):
        order = list(range(count))
        if settings.shuffle:
            random.Random(f"{settings.seed}/{epoch}").shuffle(order)
        for start in range(0, count, settings.batch):
            yield order[start : start + settings.batch]


def scheduled_rate(step: int, steps: int, settings: FitSettings) -> float:
    """Linear warm-up, then a cosine down to the final share."""
    warmup = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return settings.learning_rate * warmup * (settings.final_share + (1 - settings.final_share) * cosine)


class Fit:
    """Owns the optimiser of a module and their checkpoints."""

    def __init__(
        self,
        module: nn.Module,
        settings: FitSettings,
        work_dir: Path,
        world: World,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.module, self.settings, self.work_dir, self.world = module, settings, work_dir, world
        self._clock = clock
        self._optimiser = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._checkpoints = Checkpoints(checkpoints_of(work_dir), world, keep=settings.keep_checkpoints)

    def run(
        self,
        plan: Mapping[str, Any],
        examples: int,
        learn: Callable[[list[int]], float],
        on_step: Callable[[FitReport], None] = lambda report: None,
    ) -> Path:
        """`learn` leaves the gradients of the named examples and returns their loss. Returns the last checkpoint."""
        self._bind(plan)
        order = list(step_order(examples, self.settings))
        with self._checkpoints:
            for step in range(self._resume(), len(order)):
                on_step(self._step(step, len(order), learn, order[step]))
                if (step + 1) % self.settings.checkpoint_every == 0:
                    self._save(step + 1)
            self._save(len(order))
        return self._checkpoints.path(len(order))

    def _bind(self, plan: Mapping[str, Any]) -> None:
        """Other data or settings would make a result that belongs to neither run."""
        path = self.work_dir / PLAN_FILE
        written = json.loads(json.dumps(plan))
        if path.exists() and json.loads(path.read_bytes()) != written:
            raise ConfigError(
                f"{self.work_dir} was begun with other data or settings.",
                hint="Repeat the same command to go on, or give another directory.",
            )
        if self.world.is_main:
            write_atomic(path, json.dumps(written, indent=2).encode() + b"\n")

    def _step(self, step: int, steps: int, learn: Callable[[list[int]], float], chosen: list[int]) -> FitReport:
        started = self._clock()
        loss = learn(chosen)
        norm = clip_gradients(self.module.parameters(), self.settings.max_grad_norm)
        if not math.isfinite(norm):
            raise DivergedError(f"The gradient of step {step} is not finite.", hint="Lower the learning rate.")
        rate = scheduled_rate(step, steps, self.settings)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        return FitReport(step + 1, steps, loss, norm, rate, self._clock() - started)

    def _save(self, step: int) -> None:
        self._checkpoints.save(step, self.module, self._optimiser, {"updates": step})

    def _resume(self) -> int:
        steps = self._checkpoints.steps()
        if steps:
            self._checkpoints.load(steps[-1], self.module, self._optimiser)
        return steps[-1] if steps else 0
