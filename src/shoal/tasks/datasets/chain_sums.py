"""The built-in task set `chain-sums`: two chained additions or subtractions, such as `47+38-19`.

Operands have two digits and every true intermediate result lies in 0 … 99, so a tiny model can know the sums and
still has to carry a result from one step to the next. The problem itself decides, by its hash, whether it is held out: no
seed, and no data that the bundled policy was trained on, ever shows a held-out problem to training.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from shoal.errors import ConfigError
from shoal.tasks.task import Task, TaskSet, TaskSets

SOURCE = "builtin:chain-sums"
HELDOUT_ONE_IN = 16
SMALLEST, LARGEST = 10, 99
MOST_TASKS = {"tasks.count": 1 << 17, "tasks.heldout": 1 << 13}
"""Well below the number of distinct problems, so that drawing new ones stays quick to the last."""


@dataclass(frozen=True)
class ChainSum:
    """`first + second + third`, the last two signed."""

    first: int
    second: int
    third: int

    @property
    def expression(self) -> str:
        return f"{self.first}{self.second:+d}{self.third:+d}"

    @property
    def prompt(self) -> str:
        return f"Compute {self.expression}."

    @property
    def answer(self) -> int:
        return self.first + self.second + self.third

    @property
    def is_heldout(self) -> bool:
        return blake3(self.expression.encode()).digest()[0] % HELDOUT_ONE_IN == 0


def sample_chain_sum(rng: random.Random) -> ChainSum:
    first = rng.randint(SMALLEST, LARGEST)
    second = _draw_operand(rng, first)
    return ChainSum(first, second, _draw_operand(rng, first + second))


def _draw_operand(rng: random.Random, total: int) -> int:
    """A signed operand that keeps the running total in 0 … 99; one of the two signs always can."""
    sign = rng.choice((1, -1))
    most = {1: LARGEST - total, -1: total}
    if most[sign] < SMALLEST:
        sign = -sign
    return sign * rng.randint(SMALLEST, most[sign])


def generate(count: int, heldout: int, seed: int) -> TaskSets:
    """Distinct problems, in an order that only the seed and the two counts decide."""
    return TaskSets(
        train=_task_set(count, random.Random(2 * seed), heldout=False),
        heldout=_task_set(heldout, random.Random(2 * seed + 1), heldout=True),
    )


def _task_set(count: int, rng: random.Random, *, heldout: bool) -> TaskSet:
    return TaskSet(as_task(problem) for problem in _distinct(count, rng, heldout=heldout))


def _distinct(count: int, rng: random.Random, *, heldout: bool) -> Iterator[ChainSum]:
    setting = "tasks.heldout" if heldout else "tasks.count"
    if count > MOST_TASKS[setting]:
        raise ConfigError(f"chain-sums has at most {MOST_TASKS[setting]} such problems.", hint=f"Lower {setting}.")
    seen: set[ChainSum] = set()
    while len(seen) < count:
        problem = sample_chain_sum(rng)
        if problem not in seen and problem.is_heldout == heldout:
            seen.add(problem)
            yield problem


def as_task(problem: ChainSum) -> Task:
    return Task(
        problem_id=f"chain-sums/{problem.expression}",
        source=SOURCE,
        task_type="integer_answer",
        prompt=problem.prompt,
        verification_info={"answer": problem.answer},
        metadata={"terms": [problem.first, problem.second, problem.third]},
    )
