"""The step size of each optimiser step: linear warm-up, then constant, or down to 0 at the last step of the run.

The number of optimiser steps is that of a run whose batches all have their mini-batches; a run that skips some ends above 0.
"""

import math
from collections.abc import Callable

from shoal.config import TrainingConfig
from shoal.errors import ConfigError

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}
"""Share of the step size by the share of the way from the end of the warm-up, 0, to that of the run, 1."""


def learning_rate(config: TrainingConfig, update: int, steps: int = 0) -> float:
    """Of the optimiser step that follows `update` others, in a run of `steps` training steps."""
    warm = min(1.0, (update + 1) / max(1, config.warmup_steps))
    return config.learning_rate * warm * DECAYS[config.schedule](_progress(config, update, steps))


def check_schedule(config: TrainingConfig, steps: int) -> None:
    """Refuse a decay without an end."""
    if config.schedule != "constant" and steps <= 0:
        raise ConfigError(f"training.schedule = '{config.schedule}' needs the number of training steps.")


def _progress(config: TrainingConfig, update: int, steps: int) -> float:
    if config.schedule == "constant":
        return 0.0
    updates = steps * config.minibatches * config.epochs
    decaying = max(1, updates - config.warmup_steps)
    return min(1.0, max(0, update - config.warmup_steps) / decaying)
