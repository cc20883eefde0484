"""A whole swarm on one machine under SIGKILLs of random roles, the supervisor included, behind a network that loses, doubles,
delays and cuts requests and answers. At the end every promise is checked: the steps asked for, each accepted group consumed at most
once and none lost, the ledger, balances that follow from verdicts, versions that follow bit for bit from the recorded batches,
no honest worker penalised, no orphan process, no temporary file.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from end_to_end.chaos import Outcome, Plan, run_chaos  # noqa: E402
from end_to_end.invariants import violations  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=Plan.kills)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--mean-pause", type=float, default=Plan.mean_pause_s, help="seconds between two kills")
    parser.add_argument("--deadline", type=float, default=Plan.deadline_s, help="seconds for the whole run")
    parser.add_argument("--work", type=Path, help="directory to keep; a temporary one without it")
    options = parser.parse_args()
    plan = Plan(options.steps, options.kills, options.mean_pause, options.seed, deadline_s=options.deadline)
    if options.work is not None:
        options.work.mkdir(parents=True)
        result = measure(options.work, plan)
    else:
        with tempfile.TemporaryDirectory() as directory:
            result = measure(Path(directory), plan)
    print(json.dumps(result))
    raise SystemExit(1 if result["violations"] else 0)


def measure(root: Path, plan: Plan) -> dict[str, object]:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    outcome = run_chaos(root, plan, say)
    found = violations(outcome)
    for sentence in found:
        say(f"VIOLATION: {sentence}")
    return {"benchmark": "chaos", **metrics_of(outcome), "violations": len(found), "violated": found}


def metrics_of(outcome: Outcome) -> dict[str, object]:
    faults = {name: count for name, count in sorted(outcome.faults.items()) if name not in ("none", "server_away")}
    return {
        "kills": outcome.kills,
        "steps": outcome.plan.steps,
        "versions_while_killing": outcome.last_version - outcome.first_version,
        "killed": dict(sorted(outcome.killed.items())),
        "requests": sum(outcome.faults.values()) - outcome.faults["server_away"],
        "faults": faults,
        "seed": outcome.plan.seed,
        "wall_s": round(outcome.wall_s, 1),
        "machine": platform.platform(),
    }


if __name__ == "__main__":
    main()
