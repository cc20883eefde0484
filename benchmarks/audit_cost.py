"""What auditing costs beside generating: CPU seconds of the validator over CPU seconds of the worker, for the same submissions.

Worker: generation with commitments, rewards, and the rollout file. Validator: reading, every check of the claims, and for audited
submissions one prefill with margins, commitments and log-probabilities. Both in one process, interleaved, one thread; the figure
is the ratio of the medians. At the floor, 10 % are audited and all are read. Re-scoring of rewards is reported apart.

The first numbers are of one file at a time, each right after it was made. `together` is what a validator does while files wait: it
reads --together of them one after the other and audits every tenth group of them in common passes.

A low-entropy policy often gives the same completion twice, and an audit computes it once; `hot` is the same measurement at a
temperature at which hardly any two completions agree.
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

from adversaries.arena import Arena, make_arena, make_model_arena, with_model  # noqa: E402
from shoal.config import TrustConfig, load_config  # noqa: E402
from shoal.policy import TorchEngine  # noqa: E402
from shoal.validation import Checked, audit, check_claims  # noqa: E402
from shoal.validation.checks import Audit, audit_all  # noqa: E402
from support.submissions import Submission  # noqa: E402

HOT_TEMPERATURE = 2.0
FIRST_TOGETHER = 10_000

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def timed(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> tuple[Result, float]:
    started = time.process_time()
    return work(*arguments, **named), time.process_time() - started


def score_again(arena: Arena, checked: Checked) -> None:
    rows = zip(checked.items, checked.rollouts, strict=True)
    arena.workload.rewards([(item.task, item.target_length, row.output_tokens) for item, row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--submissions", type=int, default=24)
    parser.add_argument("--together", type=int, default=8, help="files that a validator claims at once")
    parser.add_argument(
        "--model", type=Path, help="another model than the bundled one, with slots of 4 × 8 completions"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        arena = arena_for(Path(directory), options.model)
        metrics = measure(arena, options.submissions, arena.temperature)
        hot = measure(arena, options.submissions, HOT_TEMPERATURE)
        common = measure_together(arena, options.submissions, options.together)
        counts = {"benchmark": "audit_cost", "submissions": options.submissions}
        print(json.dumps({**counts, **metrics, "hot": hot, "together": common}))


def arena_for(directory: Path, model: Path | None) -> Arena:
    config = load_config(ROOT / "configs/demo.toml")
    if model is None:
        return make_arena(directory, config)
    return make_model_arena(directory, with_model(config, model, tasks_per_slot=4, max_prompt_tokens=128))


def distinct_share(checked: Checked) -> float:
    """Of all output tokens, those that no earlier row of the same prompt has in the same completion."""
    distinct = {(tuple(row.input_tokens), tuple(row.output_tokens)) for row in checked.rollouts}
    return sum(len(output) for _, output in distinct) / sum(len(row.output_tokens) for row in checked.rollouts)


def made_by(arena: Arena, worker: TorchEngine, slot: int, temperature: float) -> tuple[Submission, bytes]:
    (submission,) = arena.sampled([slot], worker, temperature)
    return submission, submission.data


def measure(arena: Arena, submissions: int, temperature: float) -> dict[str, Any]:
    worker = arena.engine()
    limits = arena.calibration.limits(worker.numerics_class)
    assert limits is not None

    made_by(arena, worker, 0, temperature)
    seconds: dict[str, list[float]] = {"worker": [], "claims": [], "rewards": [], "audit": []}
    shares = []
    for slot in range(1, submissions + 1):
        (submission, data), made = timed(made_by, arena, worker, slot, temperature)
        claim = submission.claim()
        checked, claims = timed(check_claims, data, claim, arena.workload, arena.validator.vocab_size)
        _, rewards = timed(score_again, arena, checked)
        _, audited = timed(audit, checked, arena.validator, limits, temperature, checked.rows_by_group())
        shares.append(distinct_share(checked))
        for name, value in zip(seconds, (made, claims, rewards, audited), strict=True):
            seconds[name].append(value)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rate, checks = TrustConfig().audit_floor, middle["claims"] - middle["rewards"]
    return {
        "full_audit": round((checks + middle["audit"]) / middle["worker"], 3),
        "at_floor": round((checks + rate * middle["audit"]) / middle["worker"], 3),
        "rescoring": round(middle["rewards"] / middle["worker"], 3),
        "distinct_share": round(statistics.mean(shares), 3),
        "cpu_seconds": {name: round(value, 4) for name, value in middle.items()},
    }


def measure_together(arena: Arena, submissions: int, files: int) -> dict[str, Any]:
    worker = arena.engine()
    limits = arena.calibration.limits(worker.numerics_class)
    assert limits is not None
    made_by(arena, worker, 0, arena.temperature)
    seconds: dict[str, list[float]] = {"worker": [], "claims": [], "rewards": [], "audit": [], "floor": []}
    for first in range(FIRST_TOGETHER, FIRST_TOGETHER + submissions, files):
        batch = [timed(made_by, arena, worker, slot, arena.temperature) for slot in range(first, first + files)]
        made = [submission for (submission, _), _ in batch]
        found = [
            timed(check_claims, data, submission.claim(), arena.workload, arena.validator.vocab_size)
            for (submission, data), _ in batch
        ]
        checked = [one for one, _ in found]
        scored = [timed(score_again, arena, one)[1] for one in checked]
        groups = [(at, group) for at, one in enumerate(checked) for group in one.rows_by_group()]
        for name, chosen in (("audit", groups), ("floor", groups[:: round(1 / TrustConfig().audit_floor)])):
            wanted = [[group for where, group in chosen if where == at] for at in range(len(checked))]
            audits = [Audit(one, own, limits) for one, own in zip(checked, wanted, strict=True) if own]
            arena.validator.forget()
            seconds[name].append(timed(audit_all, audits, arena.validator, arena.temperature)[1] / len(made))
        seconds["worker"] += [taken for _, taken in batch]
        seconds["claims"] += [taken for _, taken in found]
        seconds["rewards"] += scored
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    checks = middle["claims"] - middle["rewards"]
    return {
        "files": files,
        "full_audit": round((checks + middle["audit"]) / middle["worker"], 3),
        "at_floor": round((checks + middle["floor"]) / middle["worker"], 3),
        "cpu_seconds": {name: round(value, 4) for name, value in middle.items()},
    }


if __name__ == "__main__":
    main()
