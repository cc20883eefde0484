"""Where batches of tasks are answered: in this process, in several processes of this machine, or by actors of a Ray cluster.

An executor takes numbered batches of tasks and yields their answers as they get ready, in any order. Each process loads the
policy once. Answers do not depend on the executor: seeds follow from the problems. A process that dies ends the run with an
error that says so; the answers yielded before are kept.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.evaluation.answers import Answer
from shoal.evaluation.generator import AnswerGenerator, SamplingSettings
from shoal.tasks import Task
from shoal.tether import tether

Batch = tuple[int, Sequence[Task]]
Answered = tuple[int, list[Answer]]
Executor = Callable[[Sequence[Batch]], Iterator[Answered]]
RAY_BATCH_DEADLINE_S = 6 * 3600.0
RAY_CONNECT_S = 10.0


@dataclass(frozen=True)
class EngineSpec:
    """What a process needs to begin: the policy by name, so that another machine finds its own copy, and how to sample it."""

    model: str
    engine: str
    settings: SamplingSettings
    threads: int = 0
    """Compute threads of each process; 0 leaves the choice to torch."""

    def load(self) -> AnswerGenerator:
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        return AnswerGenerator.load(self.model, self.engine, self.settings)


def run_inline(spec: EngineSpec) -> Executor:
    """Everything in this process."""

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        generator = spec.load() if batches else None
        for number, tasks in batches:
            assert generator is not None
            yield number, generator.answer(tasks)

    return work


@cache
def _loaded(spec: EngineSpec) -> AnswerGenerator:
    return spec.load()


def _begin(spec: EngineSpec, parent_pid: int) -> None:
    tether(parent_pid)  # a killed driver leaves no orphans behind
    _loaded(spec)


def _answer(spec: EngineSpec, number: int, tasks: Sequence[Task]) -> Answered:
    return number, _loaded(spec).answer(tasks)


def run_processes(spec: EngineSpec, count: int) -> Executor:
    """Several processes of this machine, each with its own engine and its share of the cores."""
    share = spec.threads or max(1, (os.cpu_count() or 1) // count)
    member = EngineSpec(spec.model, spec.engine, spec.settings, share)

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        if not batches:
            return
        with ProcessPoolExecutor(
            min(count, len(batches)),
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(member, os.getpid()),
        ) as pool:
            waiting: set[Future[Answered]] = {pool.submit(_answer, member, number, tasks) for number, tasks in batches}
            try:
                while waiting:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ready:
                        yield future.result()
            except BrokenProcessPool:
                raise UnavailableError(
                    "A process that answers tasks died.",
                    hint="Is there memory for that many copies of the policy? The same command goes on from the finished batches.",
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return work


def run_ray(spec: EngineSpec, count: int, address: str, *, gpus: float = 0.0) -> Executor:
    """Actors of a Ray cluster; the driver, here, keeps the answers."""
    ray = _import_ray()

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        if not batches:
            return
        _connect(ray, address)
        try:
            remote: Any = ray.remote(num_cpus=spec.threads or 1, num_gpus=gpus)(_Actor)
            actors = [remote.remote(spec) for _ in range(min(count, len(batches)))]
            yield from _distribute(ray, actors, list(batches))
        finally:
            ray.shutdown()

    return work


class _Actor:
    """Runs on a node of the cluster."""

    def __init__(self, spec: EngineSpec) -> None:
        self._generator = spec.load()

    def answer(self, number: int, tasks: Sequence[Task]) -> Answered:
        return number, self._generator.answer(tasks)


def _as_shoal_error(error: Exception) -> ShoalError:
    """The error that an actor raised, if it is one of ours; otherwise the last line of its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ShoalError):
        return cause
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return UnavailableError(
        f"An actor of the Ray cluster failed: {last}", hint="The same command goes on from the finished batches."
    )


def _distribute(ray: Any, actors: Sequence[Any], batches: list[Batch]) -> Iterator[Answered]:
    """One batch per actor at a time: when the driver dies, no more than those are lost."""
    batches.reverse()
    busy: dict[Any, Any] = {}
    for actor in actors:
        number, tasks = batches.pop()
        busy[actor.answer.remote(number, tasks)] = actor
    while busy:
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=RAY_BATCH_DEADLINE_S)
        if not ready:
            raise UnavailableError(f"No actor of the Ray cluster finished a batch in {RAY_BATCH_DEADLINE_S:.0f} s.")
        actor = busy.pop(ready[0])
        try:
            answered: Answered = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            raise _as_shoal_error(error) from error
        if batches:
            number, tasks = batches.pop()
            busy[actor.answer.remote(number, tasks)] = actor
        yield answered


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed.", hint="Install it with: pip install 'shoal[ray]'.") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnavailableError(
            f"There is no Ray cluster at {address}: {first}",
            hint="`ray start --head` prints the address; `auto` finds the cluster of this machine.",
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes before it says that nothing listens there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=RAY_CONNECT_S).close()
