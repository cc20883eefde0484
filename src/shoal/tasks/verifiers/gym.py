"""Tasks of reasoning-gym by name and seed, scored by its own functions.

`reasoning-gym:NAME` generates the same tasks from the same seed and release. They may evaluate what the model wrote, so they run
in the confined processes of the scorer pool. Tolerant: releases of the package differ.
"""

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from shoal.errors import ConfigError
from shoal.tasks.task import Task, TaskSet, TaskSets
from shoal.tasks.verifiers.answers import NEVER_CLOSED, SEVERAL_ANSWERS, answer_part, boxed_answers, final_answer
from shoal.tasks.verifiers.scorer_pool import OVER_LIMIT, shared_scorers
from shoal.tasks.verifiers.text import Info, Outcome, shown

PREFIX = "reasoning-gym:"
TASK_TYPE = "reasoning_gym"
HELDOUT_SEED = 1 << 30
LONGEST_ANSWER = 20_000


class GymInfo(Info):
    dataset: str
    entry: dict[str, Any]


def check_gym(info: GymInfo, text: str) -> Outcome:
    """The scorer's reward for the tagged, boxed or final answer, or else for all that follows the thinking."""
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    if len(boxed_answers(answer)) > 1:
        return Outcome(0.0, SEVERAL_ANSWERS)
    found = (tagged_answer(answer) or final_answer(answer) or answer).strip()
    if len(found) > LONGEST_ANSWER:
        return Outcome(0.0, f"the answer is longer than {LONGEST_ANSWER} letters")
    require_package()
    scored = shared_scorers().ask(info.dataset, info.entry, found)
    if scored is None:
        return OVER_LIMIT
    reward, cost_s = scored
    return Outcome(min(1.0, max(0.0, reward)), f"reasoning-gym gives {reward:g} for {shown(found)}", cost_s=cost_s)


def tagged_answer(answer: str) -> str | None:
    """The text in the last pair of <answer> tags."""
    before, tag, _ = answer.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return inside if tag and opening else None


def generate(source: str, count: int, heldout: int, seed: int) -> TaskSets:
    name = source.removeprefix(PREFIX)
    train = TaskSet(_tasks(name, count, seed))
    known = set(train.table.column("prompt").to_pylist())
    unseen = (task for task in _tasks(name, 4 * heldout, seed + HELDOUT_SEED) if task.prompt not in known)
    kept = [task for task, _ in zip(unseen, range(heldout), strict=False)]
    if not kept:
        raise ConfigError(f"{source} has no tasks left to hold out.", hint="Lower tasks.count.")
    return TaskSets(train=train, heldout=TaskSet(kept))


def _tasks(name: str, count: int, seed: int) -> Iterator[Task]:
    require_package()
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(name, size=count, seed=seed)
    except ValueError as error:
        raise ConfigError(f"reasoning-gym has no dataset {name!r}: {error}.") from None
    for number, entry in enumerate(dataset):
        plain = json.loads(json.dumps(entry, default=str))
        yield Task(
            problem_id=f"{PREFIX}{name}/{seed}/{number}",
            source=f"{PREFIX}{name}",
            task_type=TASK_TYPE,
            prompt=str(entry["question"]),
            verification_info={"dataset": name, "entry": plain},
        )


def require_package() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed.", hint="pip install 'shoal[reasoning-gym]'")
