"""Answers every task of a set with a policy, batch by batch; it can be killed at any moment.

Finished batches are in the journal; the same call goes on with the rest. Progress is reported after every batch, with the time that
is left at the pace so far.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.errors import ConfigError
from shoal.evaluation.answers import Answer
from shoal.evaluation.executors import Batch, EngineSpec, Executor, run_inline, run_processes, run_ray
from shoal.evaluation.generator import policy_digest
from shoal.evaluation.journal import Journal
from shoal.locks import hold
from shoal.metrics import Report
from shoal.policy.directory import resolve_policy
from shoal.tasks import Task


def make_executor(spec: EngineSpec, *, count: int, ray_address: str | None = None, gpus: float = 0.0) -> Executor:
    if ray_address is not None:
        return run_ray(spec, count, ray_address, gpus=gpus)
    return run_inline(spec) if count == 1 else run_processes(spec, count)


def answer_tasks(
    tasks: Sequence[Task],
    spec: EngineSpec,
    executor: Executor,
    directory: Path,
    report: Report,
    *,
    batch_tasks: int = 32,
    clock: Callable[[], float] = time.monotonic,
) -> Journal:
    """The journal with k answers to each task, in the order of the tasks, whatever order the executor worked in."""
    check_tasks(tasks)
    busy = f"Another process gathers answers in {directory}."
    with hold(directory / "lock", busy, hint="Wait for it, or give another directory."):
        journal = Journal(directory, plan_of(tasks, spec, batch_tasks))
        batches = cut(tasks, batch_tasks)
        done = journal.done()
        left = [batch for batch in batches if batch[0] not in done]
        if done:
            report(f"{len(done)} of {len(batches)} batches were there already")
        started = clock()
        for finished, (number, answers) in enumerate(executor(left), start=1):
            journal.add(number, answers)
            report(
                _progress(
                    len(done) + finished, len(batches), answers, (clock() - started) / finished, len(left) - finished
                )
            )
        return journal


def check_tasks(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise ConfigError("The task set is empty.")
    seen: set[str] = set()
    for task in tasks:
        if task.problem_id in seen:
            raise ConfigError(f"Two tasks have the id {task.problem_id}.", hint="Give every task its own problem_id.")
        seen.add(task.problem_id)


def plan_of(tasks: Sequence[Task], spec: EngineSpec, batch_tasks: int) -> dict[str, Any]:
    """What the answers depend on; the engine's kind and the number of processes are left out on purpose."""
    hasher = blake3()
    for task in tasks:
        hasher.update(task.model_dump_json().encode() + b"\n")
    policy = policy_digest(resolve_policy(spec.model))
    return {"policy": policy, "tasks": hasher.hexdigest(), "batch_tasks": batch_tasks, **asdict(spec.settings)}


def cut(tasks: Sequence[Task], batch_tasks: int) -> list[Batch]:
    return [
        (number, tasks[start : start + batch_tasks]) for number, start in enumerate(range(0, len(tasks), batch_tasks))
    ]


def _progress(done: int, total: int, answers: Sequence[Answer], batch_s: float, left: int) -> str:
    solved = sum(answer.solved for answer in answers) / len(answers)
    return f"batch {done}/{total}: {solved:.0%} of its answers right, about {batch_s * left:.0f} s left"
