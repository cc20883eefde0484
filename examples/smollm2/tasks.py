"""The tasks of this example: which of two to five numbers is the largest, or the smallest.

    python examples/smollm2/tasks.py OUT [--count 4000] [--test 400]

Writes OUT/train.jsonl, from which a run trains and holds out a part for its curve, and OUT/test.jsonl, which nothing but the final
comparison sees. SmolLM2-135M half-knows them: it names the right number in a fifth of its answers, and rambles in the rest. No
question of one file is in the other, whatever the order of its numbers.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES = (2, 3, 4, 5)
NUMBERS = range(10, 100)


def draw(rng: random.Random) -> dict[str, Any]:
    numbers = rng.sample(NUMBERS, rng.choice(SIZES))
    largest = rng.random() < 0.5
    if len(numbers) == 2:
        prompt = f"Which is {'larger' if largest else 'smaller'}, {numbers[0]} or {numbers[1]}?"
    else:
        word = "largest" if largest else "smallest"
        prompt = f"Which of these numbers is the {word}: {', '.join(map(str, numbers))}?"
    return {
        "problem_id": f"{'max' if largest else 'min'}-{'-'.join(map(str, numbers))}",
        "task_type": "last_number",
        "prompt": prompt,
        "verification_info": {"answer": max(numbers) if largest else min(numbers)},
        "metadata": {"category": f"{'largest' if largest else 'smallest'} of {len(numbers)}"},
    }


def distinct(rng: random.Random, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Questions whose numbers were not asked about before in the same way, in any order."""
    while True:
        task = draw(rng)
        kind, *numbers = task["problem_id"].split("-")
        key = " ".join([kind, *sorted(numbers)])
        if key not in seen:
            seen.add(key)
            yield task


def write(path: Path, tasks: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--test", type=int, default=400)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    questions = distinct(random.Random(0), set())
    write(options.out / "test.jsonl", [next(questions) for _ in range(options.test)])
    write(options.out / "train.jsonl", [next(questions) for _ in range(options.count)])


if __name__ == "__main__":
    main()
