"""Tasks for a frame policy: make a small buffer equal to another; and demonstrations of it.

Buffers are lines of the standard library, cut to the window. The one to start with has seeded damage: characters that are
wrong, missing, doubled or swapped. Task and demonstration are pure functions of (lines, seed). Held-out tasks come from files
that the training split does not have.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.frames.corpus import CorpusError, Split, library_files
from shoal.frames.screens import GOAL
from shoal.frames.sessions import repair_keys
from shoal.tasks import Task
from shoal.tasks.editor import SAVE

TASK_TYPE = "editing"
SHORTEST_LINE = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


@dataclass(frozen=True)
class Window:
    """What a policy can show of a buffer."""

    rows: int
    columns: int


def usable_lines(root: Path, split: Split, window: Window, skipped: Counter[str]) -> list[str]:
    """Lines that fit into the window with room for one more character; others are skipped and counted."""
    kept: dict[str, None] = {}
    for _, lines in library_files(root, split, skipped):
        for line in map(str.strip, lines):
            if SHORTEST_LINE <= len(line) < window.columns - 1 and GOAL not in line:
                kept[line] = None
            else:
                skipped["lines too long or too short"] += 1
    if len(kept) < window.rows:
        raise CorpusError(f"{root} has {len(kept)} lines of {SHORTEST_LINE} to {window.columns - 2} characters.")
    return list(kept)


def repair_tasks(lines: Sequence[str], window: Window, count: int, *, most: int, seed: int) -> Iterator[Task]:
    """Tasks with one to `most` places of damage each."""
    rng = random.Random(seed)
    for number in range(count):
        after = rng.sample(lines, rng.randint(1, window.rows))
        places = rng.randint(1, most)
        before = list(after)
        while before == after:
            for _ in range(places):
                at = rng.randrange(len(before))
                before[at] = _damage(before[at], rng)[: window.columns - 1]
        yield as_task(f"repair-{seed}-{number}", before, after, window)


def as_task(name: str, before: Sequence[str], after: Sequence[str], window: Window) -> Task:
    old, new = "\n".join(before), "\n".join(after)
    return Task(
        problem_id=name,
        source=TASK_TYPE,
        prompt=f"{old}{GOAL}{new}",
        task_type=TASK_TYPE,
        verification_info={"before": old, "after": new, "rows": window.rows},
    )


def demonstration_keys(task: Task, window: Window) -> str:
    """How an orderly editor solves a task, without the key that saves."""
    before, after = (str(task.verification_info[name]).split("\n") for name in ("before", "after"))
    return repair_keys(before, after, window.rows, window.columns).removesuffix(SAVE)


def _damage(line: str, rng: random.Random) -> str:
    at = rng.randrange(len(line))
    kind = rng.randrange(4)
    if kind == 0:
        return line[:at] + rng.choice(LETTERS) + line[at + 1 :]
    if kind == 1 and len(line) > 1:
        return line[:at] + line[at + 1 :]
    if kind == 2:
        return line[:at] + rng.choice(LETTERS) + line[at:]
    return line[:at] + line[at : at + 2][::-1] + line[at + 2 :]
