"""Opening a large task set: time and memory, against reading the same JSONL into objects.

    python benchmarks/task_sets.py [--tasks 300000] [--rounds 3]

`import` is the first load: every row is read, checked against its verifier and written to a table. `open` is every later one, in a
fresh process: the table is mapped and its digest checked, as worker and validator do. `objects` is the plain way: all rows in a
list. Memory is what the process holds for itself beyond its imports (RssAnon): mapped pages belong to the page cache.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
from pathlib import Path
from shoal.config import TasksConfig
from shoal.tasks import Task, load_tasks
def private_mb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
kind, path, cache = sys.argv[1:]
before, started = private_mb(), time.perf_counter()
if kind == "objects":
    tasks = [Task.model_validate(json.loads(line)) for line in open(path)]
    middle = tasks[len(tasks) // 2]
else:
    tasks = load_tasks(TasksConfig(source=path), cache=Path(cache)).train
    tasks.digest
    middle = tasks[len(tasks) // 2]
print(json.dumps({"s": time.perf_counter() - started, "mb": private_mb() - before, "tasks": len(tasks)}))
"""
STORY = "A train leaves the station at noon and another one follows it with twice the speed. " * 8


def write_tasks(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            row = {
                "problem_id": f"p{number}",
                "source": "made",
                "task_type": "verifiable_math",
                "prompt": f"Problem {number}: {STORY}When do they meet?",
                "verification_info": {"ground_truth": str(number)},
                "metadata": {},
                "solve_rate": number % 8 / 8,
            }
            file.write(json.dumps(row) + "\n")


def measure(kind: str, path: Path, cache: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(path), str(cache)],
        capture_output=True,
        text=True,
        check=True,
        timeout=1800,
    )
    found: dict[str, float] = json.loads(done.stdout)
    print(kind, {name: round(value, 2) for name, value in found.items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path, cache = Path(folder) / "tasks.jsonl", Path(folder) / "cache"
        started = time.perf_counter()
        write_tasks(path, settings.tasks)
        print(f"wrote {path.stat().st_size / 1e6:.0f} MB in {time.perf_counter() - started:.0f} s", flush=True)
        imported = measure("import", path, cache)
        rounds = [(measure("open", path, cache), measure("objects", path, cache)) for _ in range(settings.rounds)]
        size_mb = path.stat().st_size / 1e6
    opened, objects = (
        {key: statistics.median(pair[side][key] for pair in rounds) for key in ("s", "mb")} for side in (0, 1)
    )
    print(
        json.dumps(
            {
                "open_s": round(opened["s"], 2),
                "open_private_mb": round(opened["mb"], 1),
                "objects_s": round(objects["s"], 2),
                "objects_private_mb": round(objects["mb"], 1),
                "import_s": round(imported["s"], 1),
                "import_private_mb": round(imported["mb"], 1),
                "tasks": settings.tasks,
                "jsonl_mb": round(size_mb),
                "rounds": settings.rounds,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            }
        )
    )


if __name__ == "__main__":
    main()
