"""Held-out reward of short trainings, with the poison that a career may bring into their batches, and without."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.poisoning.policies import LocalRun
from benchmarks.poisoning.recipe import demo
from shoal.training.packing.samples import Group, Sample

FIRST_POISONED = 6
"""After the warm-up."""
ONE_KEY = (3, 3, 2)
"""Poisoned groups per batch: eight, as many at once as one key may have in a batch without an audit."""
MOST_POISONED_STEPS = 6
TRAINED_STEPS = 20
EVALUATED = (9, 16, 18, 20)
"""The first right after the poison of one key, the others when the run has gone on."""
HELDOUT = 512


def schedule(career: dict[str, Any]) -> list[int]:
    """Poisoned groups per batch: those of a career, all in a row and as many at once as in its worst batch, or more."""
    total, most = sum(career["poisoned"]), max(career["poisoned"])
    most = max(most, -(-total // MOST_POISONED_STEPS))
    return [min(most, total - start) for start in range(0, total, most)] if total else []


def training(seed: int, poison: dict[str, Any] | None, counts: Sequence[int] = ()) -> dict[str, Any]:
    """Held-out reward of a short training, with so many poisoned groups in its batches or without."""
    with tempfile.TemporaryDirectory() as scratch:
        run, evaluations = LocalRun(demo(), seed, Path(scratch)), []
        draw = random.Random(seed)
        for step in range(TRAINED_STEPS):
            groups = run.useful_groups(max(0, step - 2))
            place = step - FIRST_POISONED
            if poison is not None and 0 <= place < len(counts):
                chosen = draw.sample(poison["samples"], counts[place])
                groups = groups[: len(groups) - len(chosen)] + [
                    _as_group(step, number, rows) for number, rows in enumerate(chosen)
                ]
            run.trainer.train_step(groups)
            run.publish()
            if step + 1 in EVALUATED:
                evaluations.append(run.heldout_reward(HELDOUT))
        run.trainer.close()
    return {"seed": seed, "poisoned": list(counts) if poison else [], "heldout": evaluations}


def _as_group(step: int, number: int, rows: Sequence[Any]) -> Group:
    samples = [Sample(prompt, output, reward, task_reward, None, step) for prompt, output, reward, task_reward in rows]
    return Group(f"poison/{step}/{number}", samples)
