"""Who answers the batches: this process, several processes of this machine, or actors of a Ray cluster.

A crew takes numbered batches of tasks and yields their answers as they get ready, in any order. Each member loads the policy once.
Answers do not depend on the crew: seeds follow from the problems. A member that dies ends the run with an error that says so; what
was yielded before stays.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.evaluation.answers import Answer
from shoal.evaluation.respondent import AskSettings, Respondent
from shoal.tasks import Task
from shoal.tether import tether

Batch = tuple[int, Sequence[Task]]
Answered = tuple[int, list[Answer]]
Crew = Callable[[Sequence[Batch]], Iterator[Answered]]
RAY_BATCH_DEADLINE_S = 6 * 3600.0
RAY_KNOCK_S = 10.0


@dataclass(frozen=True)
class Post:
    """What a member needs to begin: the policy by name, so that another machine finds its own copy, and how to ask it."""

    model: str
    engine: str
    settings: AskSettings
    threads: int = 0
    """Compute threads of each member; 0 leaves the choice to torch."""

    def take(self) -> Respondent:
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        return Respondent.load(self.model, self.engine, self.settings)


def alone(post: Post) -> Crew:
    """Everything in this process."""

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        respondent = post.take() if batches else None
        for number, tasks in batches:
            assert respondent is not None
            yield number, respondent.answer(tasks)

    return work


_respondent: Respondent | None = None


def _begin(post: Post, parent_pid: int) -> None:
    global _respondent
    tether(parent_pid)  # a killed driver leaves no orphans behind
    _respondent = post.take()


def _answer(number: int, tasks: Sequence[Task]) -> Answered:
    assert _respondent is not None
    return number, _respondent.answer(tasks)


def processes(post: Post, count: int) -> Crew:
    """Several processes of this machine, each with its own engine and its share of the cores."""
    share = post.threads or max(1, (os.cpu_count() or 1) // count)
    member = Post(post.model, post.engine, post.settings, share)

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        if not batches:
            return
        with ProcessPoolExecutor(
            min(count, len(batches)),
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(member, os.getpid()),
        ) as pool:
            waiting: set[Future[Answered]] = {pool.submit(_answer, number, tasks) for number, tasks in batches}
            try:
                while waiting:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ready:
                        yield future.result()
            except BrokenProcessPool:
                raise UnavailableError(
                    "A process of the crew died.",
                    hint="Is there memory for that many copies of the policy? The same command goes on from the finished batches.",
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    return work


def ray_cluster(post: Post, count: int, address: str, *, gpus: float = 0.0) -> Crew:
    """Actors of a Ray cluster; the driver, here, keeps the answers."""
    ray = _import_ray()

    def work(batches: Sequence[Batch]) -> Iterator[Answered]:
        if not batches:
            return
        _connect(ray, address)
        try:
            actor: Any = ray.remote(num_cpus=post.threads or 1, num_gpus=gpus)(_Member)
            members = [actor.remote(post) for _ in range(min(count, len(batches)))]
            yield from _deal(ray, members, list(batches))
        finally:
            ray.shutdown()

    return work


class _Member:
    """Runs on a node of the cluster."""

    def __init__(self, post: Post) -> None:
        self._respondent = post.take()

    def answer(self, number: int, tasks: Sequence[Task]) -> Answered:
        return number, self._respondent.answer(tasks)


def _told_by(error: Exception) -> ShoalError:
    """What a member refused, as it would have said it here; otherwise the last line of its trace."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ShoalError):
        return cause
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return UnavailableError(
        f"A member of the Ray cluster failed: {last}", hint="The same command goes on from the finished batches."
    )


def _deal(ray: Any, members: Sequence[Any], batches: list[Batch]) -> Iterator[Answered]:
    """One batch per member at a time: when the driver dies, no more than those are lost."""
    batches.reverse()
    busy: dict[Any, Any] = {}
    for member in members:
        number, tasks = batches.pop()
        busy[member.answer.remote(number, tasks)] = member
    while busy:
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=RAY_BATCH_DEADLINE_S)
        if not ready:
            raise UnavailableError(f"No member of the Ray cluster finished a batch in {RAY_BATCH_DEADLINE_S:.0f} s.")
        member = busy.pop(ready[0])
        try:
            answered: Answered = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            raise _told_by(error) from error
        if batches:
            number, tasks = batches.pop()
            busy[member.answer.remote(number, tasks)] = member
        yield answered


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed.", hint="Install it with: pip install 'shoal[ray]'.") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnavailableError(
            f"There is no Ray cluster at {address}: {first}",
            hint="`ray start --head` prints the address; `auto` finds the cluster of this machine.",
        ) from error


def _knock(address: str) -> None:
    """Ray itself would try for minutes before it says that nobody is there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=RAY_KNOCK_S).close()
