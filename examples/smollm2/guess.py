"""SmolLM2-135M plays guess-number, an environment of many turns, in a whole swarm: a smoke run of two steps.

    python examples/smollm2/guess.py [--workers 1]

Fetches the model, writes tasks that name the environment, and runs the swarm of guess.toml: every episode is replayed and audited.
The last line is one JSON object; the exit code is 1 if a step is missing, a submission was rejected, or no episode had two turns.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.config import load_config

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = "examples/smollm2/guess.toml"
TASKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    config = load_config(ROOT / RUN_FILE)
    write_tasks(ROOT / config.tasks.source)
    run("examples/smollm2/fetch.py", config.model.path)
    run("-m", "shoal", "up", RUN_FILE, "--workers", str(options.workers))
    metrics = read_metrics(ROOT / config.run.dir)
    print(json.dumps(metrics))
    raise SystemExit(0 if is_whole(metrics) else 1)


def write_tasks(path: Path) -> None:
    """The last number differs from row to row, the first is 1: each row is a world of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task(number)) + "\n" for number in range(TASKS)))


def task(number: int) -> dict[str, Any]:
    return {
        "problem_id": f"guess-{number}",
        "task_type": "environment:guess-number",
        "prompt": f"I think of a number, game {number}.",
        "verification_info": {"low": 1, "high": 4 + number % 5},
    }


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def read_metrics(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "steps": summary["steps"],
        "steps_planned": summary["steps_planned"],
        "observations_per_episode": summary["tool_calls_per_episode"],
        "verdicts": summary["verdicts"],
        "rejected": summary["honest_rejected"],
        "heldout_start": summary["heldout_start"],
        "heldout_end": summary["heldout_end"],
        "ledger_ok": summary["ledger_ok"],
        "wall_s": summary["wall_s"],
    }


def is_whole(metrics: dict[str, Any]) -> bool:
    played = metrics["observations_per_episode"] is not None
    return metrics["steps"] >= metrics["steps_planned"] and not metrics["rejected"] and played and metrics["ledger_ok"]


if __name__ == "__main__":
    main()
