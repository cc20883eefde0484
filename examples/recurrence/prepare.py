"""What the example starts from: a frame policy that knows nothing, tasks, and demonstrations of other tasks.

    python examples/recurrence/prepare.py OUT [--tasks 6000] [--demonstrations 12000]

A task shows a buffer of one or two lines and the one that it should become; lines are those of Python's standard library. Tasks
to train on and demonstrations come from disjoint sets of files. What frames cannot show is skipped, with a count.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shoal.curation import Demonstration, write_demonstration
from shoal.files import write_atomic
from shoal.frames import build_table, library_files, standard_library
from shoal.frames.files import write_policy
from shoal.frames.policy import fresh_policy, policy_shape
from shoal.frames.repairs import Window, demonstration_keys, repair_tasks, usable_lines

WINDOW = Window(rows=2, columns=16)
MOST_PLACES = 2
ACTIONS = 254
"""And the two marks of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=6000)
    parser.add_argument("--demonstrations", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    skipped: Counter[str] = Counter()
    shown, asked = (usable_lines(standard_library(), split, WINDOW, skipped) for split in ("train", "heldout"))
    texts = ("\n".join(lines) for _, lines in library_files(standard_library(), "train", Counter())[::8])
    table = build_table(texts, ACTIONS)
    write_policy(fresh_policy(policy_shape(ACTIONS + 2), table, options.seed), table, options.out / "fresh")
    tasks = repair_tasks(asked, WINDOW, options.tasks, most=MOST_PLACES, seed=options.seed)
    _write(options.out / "tasks.jsonl", (task.model_dump_json() for task in tasks))
    lessons = repair_tasks(shown, WINDOW, options.demonstrations, most=MOST_PLACES, seed=options.seed + 1)
    rows = (write_demonstration(Demonstration(task, demonstration_keys(task, WINDOW))) for task in lessons)
    _write(options.out / "demonstrations.jsonl", rows)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    print(
        f"{options.tasks} tasks, {options.demonstrations} demonstrations in {options.out}; skipped: {counts or 'none'}"
    )


def _write(path: Path, rows: Iterable[str]) -> None:
    write_atomic(path, "".join(f"{row}\n" for row in rows).encode())


if __name__ == "__main__":
    main()
