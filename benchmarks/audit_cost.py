"""What judging costs beside making: CPU seconds of the validator over CPU seconds of the worker, for the same submissions.

Worker: generation with commitments, rewards, and the rollout file. Validator: reading, every check of the claims, and for audited
submissions one prefill with margins, commitments and log-probabilities. Both in one process, interleaved, one thread; the figure
is the ratio of the medians. At the floor, 10 % are audited and all are read. Re-scoring of rewards is reported apart.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from adversaries.arena import Arena, make_arena  # noqa: E402
from shoal.config import TrustConfig, load_config  # noqa: E402
from shoal.validation import Checked, audit, check_claims  # noqa: E402
from validation.submissions import Submission  # noqa: E402

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def timed(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> tuple[Result, float]:
    started = time.process_time()
    return work(*arguments, **named), time.process_time() - started


def score_again(arena: Arena, checked: Checked) -> None:
    for item, row in zip(checked.items, checked.rollouts, strict=True):
        arena.workload.reward(item.task, item.target_length, row.output_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--submissions", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        arena = make_arena(Path(directory), load_config(ROOT / "src/shoal/demo.toml"))
        print(json.dumps(measure(arena, options.submissions)))


def measure(arena: Arena, submissions: int) -> dict[str, Any]:
    worker = arena.engine()
    limits = arena.calibration.limits(worker.numerics_class)
    assert limits is not None

    def make(slot: int) -> tuple[Submission, bytes]:
        (submission,) = arena.sampled([slot], worker)
        return submission, submission.data

    make(0)
    seconds: dict[str, list[float]] = {"worker": [], "claims": [], "rewards": [], "audit": []}
    for slot in range(1, submissions + 1):
        (submission, data), made = timed(make, slot)
        claim = submission.claim()
        checked, claims = timed(check_claims, data, claim, arena.workload, arena.validator.vocab_size)
        _, rewards = timed(score_again, arena, checked)
        _, audited = timed(audit, checked, arena.validator, limits, arena.temperature)
        for name, value in zip(seconds, (made, claims, rewards, audited), strict=True):
            seconds[name].append(value)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rate, checks = TrustConfig().audit_floor, middle["claims"] - middle["rewards"]
    return {
        "benchmark": "audit_cost",
        "submissions": submissions,
        "full_audit": round((checks + middle["audit"]) / middle["worker"], 3),
        "at_floor": round((checks + rate * middle["audit"]) / middle["worker"], 3),
        "rescoring": round(middle["rewards"] / middle["worker"], 3),
        "cpu_seconds": {name: round(value, 4) for name, value in middle.items()},
    }


if __name__ == "__main__":
    main()
