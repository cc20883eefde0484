"""A made-up run with the shape of the demo: three honest workers, two cheaters, forty steps."""

import math
from collections import Counter

from shoal.protocol.api import (
    EvaluationView,
    HistoryView,
    RelayView,
    StatusView,
    TaskStatistics,
    VerdictView,
    VersionView,
    WorkerState,
    WorkerView,
)

STEPS = 40
STEP_S = 4.2


def make_worker(
    number: int, name: str, *, state: WorkerState = "active", rejected: int = 0, reason: str = ""
) -> WorkerView:
    return WorkerView(
        key=f"{number:064x}",
        name=name,
        state=state,
        reason=reason,
        credit_held=0 if state == "banned" else 50_000,
        credit_released=0 if state == "banned" else 81_234 + 1000 * number,
        submissions_accepted=3 if state == "banned" else 90 + number,
        submissions_rejected=rejected,
        last_seen_s=1.0,
        activity="generating for step 39",
        tokens_per_s=1240.0 + 55 * number,
        banned_at_s=20.0 + 8 * number if state == "banned" else None,
    )


def make_workers() -> list[WorkerView]:
    stale = "sampling, commitment: 14 of 32 tokens lost by more than 0.62; 31 exponents differ in chunk 0"
    lying = "reward: claimed 1.0, the verifier says 0.0 for task chain-sums/17204"
    return [
        make_worker(0, "honest-1"),
        make_worker(1, "honest-2"),
        make_worker(2, "honest-3"),
        make_worker(3, "cheater-stale", state="banned", rejected=1, reason=stale),
        make_worker(4, "cheater-reward", state="banned", rejected=1, reason=lying),
    ]


def make_version(version: int, *, published_s: float | None = None) -> VersionView:
    progress = 1 - math.exp(-version / 12)
    wobble = math.sin(version * 1.7) * 0.03
    metrics: dict[str, float | int | str | None] = {
        "bytes_total": 2_310_000 if version == 0 else 310_000 + 9_000 * (version % 5)
    }
    if version:
        metrics |= {
            "reward_mean": 0.33 + 0.61 * progress + wobble,
            "task_reward_mean": 0.35 + 0.61 * progress + wobble,
            "loss": 0.01 * wobble,
            "grad_norm": 0.4 - 0.2 * progress + wobble,
            "entropy": 0.9 - 0.6 * progress + wobble,
            "mean_length": 24 - 4 * progress + 8 * wobble,
            "truncation_rate": 0.04 * (1 - progress),
            "tokens": 5200,
            "time_wait_batch_s": 1.9 + 4 * wobble,
            "time_fetch_s": 0.12,
            "time_old_logprobs_s": 0.4,
            "time_train_s": 1.3,
            "time_publish_s": 0.25,
        }
    return VersionView(
        version=version,
        manifest_digest=f"{version:064x}",
        published_s=5 + STEP_S * version if published_s is None else published_s,
        report=metrics,
    )


def make_evaluation(version: int) -> EvaluationView:
    return EvaluationView(
        version=version,
        accuracy=min(1.0, 0.31 + 0.65 * (1 - math.exp(-version / 9))),
        problems=512,
        samples=1,
        mean_tokens=22.0,
        seconds=3.1,
        at_s=9 + STEP_S * version,
    )


def make_history(steps: int = STEPS) -> HistoryView:
    return HistoryView(
        versions=[make_version(version) for version in range(steps + 1)],
        evaluations=[make_evaluation(version) for version in range(0, steps + 1, 4)],
        batches=[
            {
                "step": step,
                "formed_s": 7 + STEP_S * step,
                "groups": 32,
                "generated_groups": 44 + step,
                "max_age": step % 3,
                "dropped_no_signal": 3,
            }
            for step in range(steps)
        ],
        tasks=TaskStatistics(
            tasks=3, groups=5, useful=2, samples=40, solved=17, by_solve_rate={"never": 1, "always": 2}
        ),
        bans=[worker for worker in make_workers() if worker.state == "banned"],
    )


def make_status(step: int = STEPS, *, workers: list[WorkerView] | None = None) -> StatusView:
    workers = make_workers() if workers is None else workers
    return StatusView(
        run_id="demo-5d1f90c2",
        run_state="finished" if step >= STEPS else "running",
        uptime_s=10 + STEP_S * step,
        step=step,
        steps=STEPS,
        async_level=2,
        newest_version=step,
        useful_groups=21,
        groups_needed=32,
        slots_open=3,
        submissions_pending=2,
        workers=workers,
        worker_counts=Counter(worker.state for worker in workers),
        relays=[
            RelayView(
                key=f"{number:064x}",
                url=f"http://127.0.0.1:{7310 + number}",
                newest_version=step,
                bytes_sent=73_400_000 - 9_000_000 * number,
                bytes_received=15_100_000,
                last_seen_s=0.4,
            )
            for number in range(2)
        ],
        verdicts={"accepted": 279, "rejected": 2, "quarantined": 0, "void": 1},
        recent_verdicts=[
            VerdictView(
                at_s=52.0,
                worker=f"{4:064x}",
                step=9,
                accepted=False,
                reasons=["reward"],
            )
        ],
        age_histogram={0: 412, 1: 655, 2: 213},
        ledger_entries=701,
        ledger_head="a" * 64,
    )
