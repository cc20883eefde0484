"""Up to which position each model tracks a state: the same data for all, accuracy by position, at trained and at unseen
lengths.

The critical length of a model is the first position whose accuracy is below 0.9. Each model is trained and measured as one
piece, so an interrupted experiment continues where it was.
"""

import time
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

from benchmarks.frame_experiments.sequence_models import SymbolModel, build
from benchmarks.frame_experiments.tracking import TASKS, Task

CRITICAL = 0.9
LEARNING_RATE = {"lstm": 3e-3, "mingru": 3e-3}
"""Transformers take 1e-3: they do not settle at three times that."""
CLIP = 1.0
FIRST_SHARE, SECOND_SHARE = 0.5, 0.75


@dataclass(frozen=True)
class Plan:
    length: int = 64
    unseen: int = 256
    steps: int = 1000
    batch: int = 64
    tested: int = 1024
    growing: bool = False
    """Shorter sequences first: a quarter of the length, then half of it, then all of it."""
    seed: int = 0

    def length_at(self, step: int) -> int:
        if not self.growing:
            return self.length
        done = step / self.steps
        return max(1, self.length // (4 if done < FIRST_SHARE else 2 if done < SECOND_SHARE else 1))


PLANS = {"shell": Plan(), "jumps": Plan(steps=3000, tested=2048, growing=True)}
"""With a plain loss over 64 blocks from the first step on, every model says "skipped" for ever: 89 blocks in 100 are."""


def train(name: str, task: Task, plan: Plan) -> SymbolModel:
    torch.manual_seed(plan.seed)
    model = build(name, task.fields, task.labels)
    rate = LEARNING_RATE.get(name, 1e-3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, plan.steps, pct_start=0.05)
    weights = torch.tensor(task.weights)
    for step in range(plan.steps):
        symbols, labels = task.batch(plan.batch, plan.length_at(step), seed=plan.seed * 1_000_003 + step)
        logits = model(torch.from_numpy(symbols))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten(), weight=weights)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy_by_position(model: SymbolModel, task: Task, length: int, count: int, seed: int) -> list[float]:
    """Balanced over labels: nine blocks in ten are skipped, so a model that says nothing else would be right that often."""
    symbols, labels = task.batch(count, length, seed)
    right, seen = torch.zeros(task.labels, length), torch.zeros(task.labels, length)
    for start in range(0, count, 128):
        chosen = model(torch.from_numpy(symbols[start : start + 128])).argmax(dim=-1)
        truth = torch.from_numpy(labels[start : start + 128])
        for label in range(task.labels):
            seen[label] += (truth == label).sum(dim=0)
            right[label] += ((truth == label) & (chosen == label)).sum(dim=0)
    occurs = seen > 0
    recall = torch.where(occurs, right / seen.clamp(min=1), 0.0).sum(dim=0) / occurs.sum(dim=0)
    return [round(value, 4) for value in recall.tolist()]


def critical_length(accuracies: list[float]) -> int | None:
    """The first position, counted from 1, that is not tracked; none if all are."""
    return next((at for at, value in enumerate(accuracies, 1) if value < CRITICAL), None)


def measure(name: str, task_name: str, plan: Plan) -> dict[str, object]:
    torch.set_num_threads(1)
    task = TASKS[task_name]
    started = time.process_time()
    model = train(name, task, plan)
    seconds = time.process_time() - started
    seen, unseen = (
        accuracy_by_position(model, task, length, plan.tested, seed=10**9 + plan.seed)
        for length in (plan.length, plan.unseen)
    )
    return {
        "model": name,
        "task": task_name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "accuracy": seen,
        "accuracy_unseen": unseen,
        "critical_length": critical_length(unseen),
        "cpu_s": round(seconds, 1),
        "plan": asdict(plan),
    }
