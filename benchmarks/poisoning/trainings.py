"""Held-out reward of short trainings, with the poison that a career may bring into their batches, and without."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.poisoning.policies import LocalRun
from benchmarks.poisoning.recipe import demo
from shoal.training.packing.samples import Group, Sample

POISONED_STEPS = {6: 3, 7: 3, 8: 2}
"""Groups of poison in the batches of a poisoned training, after the warm-up: the most that a median career may consume."""
TRAINED_STEPS = 20
EVALUATED = (9, 16, 18, 20)
"""The first right after the poison, the others when the run has gone on."""
HELDOUT = 512


def training(seed: int, poison: dict[str, Any] | None) -> dict[str, Any]:
    """Held-out reward of a short training, with poisoned groups in some batches or without."""
    with tempfile.TemporaryDirectory() as scratch:
        run, evaluations = LocalRun(demo(), seed, Path(scratch)), []
        draw = random.Random(seed)
        for step in range(TRAINED_STEPS):
            groups = run.useful_groups(max(0, step - 2))
            count = POISONED_STEPS.get(step, 0) if poison else 0
            if poison and count:
                chosen = draw.sample(poison["samples"], count)
                groups = groups[: len(groups) - count] + [
                    _as_group(step, number, rows) for number, rows in enumerate(chosen)
                ]
            run.trainer.train_step(groups)
            run.publish()
            if step + 1 in EVALUATED:
                evaluations.append(run.heldout_reward(HELDOUT))
        run.trainer.close()
    return {"seed": seed, "poisoned": poison is not None, "heldout": evaluations}


def _as_group(step: int, number: int, rows: Sequence[Any]) -> Group:
    samples = [Sample(prompt, output, reward, task_reward, None, step) for prompt, output, reward, task_reward in rows]
    return Group(f"poison/{step}/{number}", samples)
