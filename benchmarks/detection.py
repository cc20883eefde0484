"""Honest workers and every cheat of tests/adversaries against the checks of an audit, with the demo's slots.

    python benchmarks/detection.py [--trials 300 --honest 1600 --honest-bfloat16 400]

A trial counts only if its file differs from what an honest worker sends for the same slot. `missed` submissions passed every
check of an audit of all their groups; `groups_found` is the share of groups that an audit of one group alone rejects.
`submissions_until_ban_at_floor` plays a proven key, audited at the floor rate, that starts to cheat: claims are checked on every
submission, each group by a draw of its own, and the coordinator's own rules (trust, sequential test) decide; `_worst95` is the
95 % quantile. Further groups are audited in a run when a key has too many without an audit; that is left out here. Results are
kept per batch of slots in --work: a run that was cut off goes on where it stopped. Defaults are a smoke.
With --adapters versions are adapters of a frozen base, and the cheats are those of tests/adversaries/adapters.py.
With --episodes N the cheats of tests/adversaries/episodes.py meet replay and audit instead, N submissions each, and honest workers
play --honest episodes in batches of several sizes. With --vllm N, in vLLM's environment, an honest worker plays N episodes there.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from adversaries.adapters import ADAPTER_CHEATS, ADAPTER_SLOW_CHEATS, make_adapter_arena  # noqa: E402
from adversaries.arena import (  # noqa: E402
    COARSE_CLASS,
    Arena,
    AuditOutcome,
    GroupAudit,
    joint,
    make_arena,
    make_model_arena,
    with_model,
)
from adversaries.cheats import CHEATS, SLOW_CHEATS  # noqa: E402
from adversaries.episodes import EPISODE_CHEATS, EpisodeArena, caught, make_episode_arena  # noqa: E402
from shoal.config import TrustConfig, load_config  # noqa: E402
from shoal.coordinator.rules import drift, trust  # noqa: E402
from shoal.evaluation.statistics import binomial_upper  # noqa: E402
from shoal.files import digest_bytes, write_atomic  # noqa: E402
from shoal.policy import TorchEngine  # noqa: E402
from shoal.proofs import TOP_K, proof_bytes  # noqa: E402
from shoal.protocol.api import AuditMetrics  # noqa: E402
from shoal.protocol.verdicts import Reason, Severity, most_severe  # noqa: E402
from shoal.validation.calibration.limits import Limits  # noqa: E402
from support.submissions import Submission  # noqa: E402

BATCH_SLOTS = 25
MOST_SLOTS = 4
"""Per trial that is asked for, before a cheat is left with fewer."""
FIRST_HONEST = 100_000
"""Honest workers do other slots than cheats, and each class its own."""
FIRST_HONEST_BFLOAT16 = 200_000
HONEST_SHAPES = (*tuple((rows, 1) for rows in (256, 1024, 128, 33, 512, 64, 200, 256, 100, 512, 77)), (64, 2))
"""Rows per batch and compute threads, in turn."""
TRUST = load_config(ROOT / "configs/demo.toml").trust
FLOOR = TrustConfig().audit_floor
SMOKE_CHEATS = ["int4", "int8", "int8_true_proofs", "temperature_x0.9", "one_token", "constant_polynomials"]
ALL_CHEATS = CHEATS | SLOW_CHEATS | ADAPTER_CHEATS | ADAPTER_SLOW_CHEATS
CAREERS = 400
LONGEST_CAREER = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="submissions per cheat")
    parser.add_argument("--honest", type=int, default=12, help="honest submissions in float32")
    parser.add_argument("--honest-bfloat16", type=int, default=4, help="honest submissions in bfloat16")
    parser.add_argument("--most-slots", type=int, default=0, help="slots that a cheat may use up; default: 4 per trial")
    parser.add_argument("--only", nargs="*", default=[], help="names of cheats; all without it")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "detection", help="where results are kept")
    parser.add_argument("--model", type=Path, help="another model, moved off its grid, in small slots; a smoke")
    parser.add_argument("--adapters", action="store_true", help="cheats of a run whose versions are LoRA adapters")
    parser.add_argument("--episodes", type=int, default=0, help="submissions per episode cheat, instead of all others")
    parser.add_argument("--vllm", type=int, default=0, help="honest episodes on vLLM, instead of all others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.vllm:
        print(json.dumps(measure_vllm(options.vllm)))
        return
    if options.episodes:
        print(json.dumps(measure_episodes(options)))
        return
    config = load_config(ROOT / "configs/demo.toml")
    if options.model:
        small = {"group_size": 2, "tasks_per_slot": 2, "max_prompt_tokens": 128, "max_new_tokens": 24}
        config = with_model(config, options.model, **small)
        options.only = options.only or SMOKE_CHEATS
    settings = config.model_dump_json(include={"model", "tasks", "rollouts", "reward"})
    work = options.work / f"{digest_bytes(settings.encode())[:12]}{'-adapters' if options.adapters else ''}"
    work.mkdir(parents=True, exist_ok=True)
    make = make_adapter_arena if options.adapters else make_model_arena if options.model else make_arena
    arena = make(work, config)
    print(json.dumps(measure(arena, Results(work), options)))


def measure_episodes(options: argparse.Namespace) -> dict[str, Any]:
    """Each cheat with an episode on slots where it has something to lie about, and honest episodes in batches of three sizes."""
    pieces = options.work / "episodes"
    with tempfile.TemporaryDirectory() as root:
        arena = make_episode_arena(Path(root))
        cheats = {name: episode_cheat(arena, name, options.episodes, pieces) for name in options.only or EPISODE_CHEATS}
        engines = [episode_engine(arena, rows) for rows in (3, 8, 64)]
        honest: list[list[str]] = []
        per_slot = len(arena.items(0))
        for number, slots in enumerate(batches(-(-options.honest // per_slot), FIRST_HONEST)):
            engine = engines[number % len(engines)]
            honest += piece(
                pieces / f"honest-{slots[0]}-{len(slots)}.json",
                lambda slots=slots, engine=engine: [arena.verify(arena.honest(slot, engine)) for slot in slots],  # type: ignore[misc]
            )
            say(f"{len(honest) * per_slot} honest episodes")
    rejected = sum(bool(reasons) for reasons in honest)
    return {
        "benchmark": "detection of episode cheats",
        "cheats": cheats,
        "missed": sum(cheat["missed"] for cheat in cheats.values()),
        "honest_episodes": len(honest) * per_slot,
        "honest_submissions": len(honest),
        "honest_rejected": rejected,
        "honest_false_reject_upper95": round(binomial_upper(rejected, len(honest)), 6) if honest else None,
    }


def measure_vllm(episodes: int) -> dict[str, Any]:
    """Honest episodes whose turns vLLM samples, replayed and audited as a validator does, by the embedded engine."""
    from shoal.policy.vllm.engine import VllmEngine

    with tempfile.TemporaryDirectory() as root:
        arena = make_episode_arena(Path(root), heads=1, numerics_class="vllm/float32/cpu")
        policy = arena.run.policies[0]
        ends = arena.run.workload.codec.eos_token_ids
        engine = VllmEngine(policy.parent / "model", eos_token_ids=ends, max_batch=8)
        engine.load(policy)
        slots = range(FIRST_HONEST, FIRST_HONEST + -(-episodes // len(arena.items(0))))
        sent = [arena.honest(slot, engine) for slot in slots]
        found = [arena.verify(one) for one in sent]
    rows = [row for one in sent for row in one.rollouts]
    for reasons in filter(None, found):
        say(f"rejected: {', '.join(reasons)}")
    return {
        "benchmark": "honest episodes on vLLM",
        "numerics_class": engine.numerics_class,
        "honest_episodes": len(rows),
        "turns": sum((len(row.segment_lengths) + 1) // 2 for row in rows),
        "honest_rejected": sum(bool(reasons) for reasons in found),
    }


def episode_cheat(arena: EpisodeArena, name: str, trials: int, pieces: Path) -> dict[str, Any]:
    found: list[list[str]] = []
    for slots in batches(MOST_SLOTS * trials):
        path = pieces / f"{name}-{slots[0]}-{len(slots)}.json"
        found += piece(path, lambda slots=slots: caught(arena, name, slots))  # type: ignore[misc]
        if len(found) >= trials:
            break
    counts = Counter(reason for reasons in found for reason in reasons)
    missed = sum(most_severe([Reason(reason) for reason in reasons]) is not Severity.PROOF for reasons in found)
    say(f"{name}: {missed} of {len(found)} missed")
    return {
        "submissions": len(found),
        "missed": missed,
        "missed_upper95": round(binomial_upper(missed, len(found)), 4) if found else None,
        "reason": counts.most_common(1)[0][0] if counts else None,
    }


def piece(path: Path, verify: Callable[[], Sequence[Sequence[Reason]]]) -> list[list[str]]:
    """The reasons of each submission, from the file if an earlier run made it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps([list(reasons) for reasons in verify()]).encode())
    found: list[list[str]] = json.loads(path.read_bytes())
    return found


def episode_engine(arena: EpisodeArena, rows: int) -> TorchEngine:
    policy = arena.run.policies[0]
    ends = arena.run.workload.codec.eos_token_ids
    engine = TorchEngine(policy.parent / "model", eos_token_ids=ends, max_batch=rows)
    engine.load(policy)
    return engine


@dataclass(frozen=True)
class Results:
    """Outcomes of one kind of worker on one batch of slots, each in a file of its own."""

    directory: Path

    def outcomes(self, name: str, slots: Sequence[int], verify: Callable[[], list[AuditOutcome]]) -> list[AuditOutcome]:
        path = self.directory / f"{name}-{slots[0]}-{len(slots)}.json"
        if not path.exists():
            write_atomic(path, json.dumps([as_json(outcome) for outcome in verify()]).encode())
        return [from_json(entry) for entry in json.loads(path.read_bytes())]


def as_json(outcome: AuditOutcome) -> dict[str, Any]:
    metrics, coarse = outcome.metrics, outcome.metrics_if_coarse
    return {
        "reasons": list(outcome.reasons),
        "tokens": outcome.tokens,
        "metrics": metrics and metrics.model_dump(),
        "metrics_if_coarse": coarse and coarse.model_dump(),
        "reasons_if_coarse": list(outcome.reasons_if_coarse),
        "groups": [{"reasons": list(one.reasons), "metrics": one.metrics.model_dump()} for one in outcome.groups],
    }


def from_json(entry: dict[str, Any]) -> AuditOutcome:
    def metrics(name: str) -> AuditMetrics | None:
        return AuditMetrics.model_validate(entry[name]) if entry[name] else None

    def reasons(name: str) -> tuple[Reason, ...]:
        return tuple(map(Reason, entry[name]))

    return AuditOutcome(
        reasons("reasons"),
        entry["tokens"],
        metrics("metrics"),
        metrics("metrics_if_coarse"),
        reasons("reasons_if_coarse"),
        tuple(
            GroupAudit(tuple(map(Reason, one["reasons"])), AuditMetrics.model_validate(one["metrics"]))
            for one in entry["groups"]
        ),
    )


def measure(arena: Arena, results: Results, options: argparse.Namespace) -> dict[str, Any]:
    started = time.process_time()
    quick, slow = (ADAPTER_CHEATS, ADAPTER_SLOW_CHEATS) if options.adapters else (CHEATS, SLOW_CHEATS)
    chosen = [name for name in [*quick, *slow] if not options.only or name in options.only]
    outcomes: dict[str, list[AuditOutcome]] = {name: [] for name in ["honest", *chosen]}
    for slots in batches(options.most_slots or MOST_SLOTS * options.trials):
        # Some cheats change nothing on some slots: those go on until they have their trials.
        open_names = [name for name in outcomes if len(outcomes[name]) < options.trials]
        for name in open_names:
            outcomes[name] += results.outcomes(name, slots, lambda name=name, slots=slots: verify(arena, name, slots))  # type: ignore[misc]
        arena.forget()
        if not open_names:
            break
        say(f"slots {slots[0]}–{slots[-1]} of {len(open_names)} kinds, {time.process_time() - started:.0f} CPU seconds")
    honest = outcomes.pop("honest")
    for dtype, count, first in (
        ("float32", options.honest - len(honest), FIRST_HONEST),
        ("bfloat16", options.honest_bfloat16, FIRST_HONEST_BFLOAT16),
    ):
        for number, slots in enumerate(batches(count, first)):
            honest += results.outcomes(
                f"honest-{dtype}",
                slots,
                lambda slots=slots, number=number, dtype=dtype: verify_honest(arena, slots, dtype, number),  # type: ignore[misc]
            )
            arena.forget()
            say(f"{len(honest)} honest after {time.process_time() - started:.0f} CPU seconds")
    fine, coarse = honest[: len(honest) - options.honest_bfloat16], honest[len(honest) - options.honest_bfloat16 :]
    by_class = {arena.validator.numerics_class: fine, COARSE_CLASS: coarse}
    return report(arena, honest, outcomes) | {
        "honest_by_class": {name: len(found) for name, found in by_class.items()},
        "honest_rejected_by_class": {
            name: Counter(str(reason) for outcome in found for reason in outcome.reasons)
            for name, found in by_class.items()
        },
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def verify(arena: Arena, name: str, slots: Sequence[int]) -> list[AuditOutcome]:
    if name == "honest":
        return verify_all(arena, arena.honest(slots))
    forged = ALL_CHEATS[name](arena, slots)
    # Proving honest tokens again changes last bits of some proofs; that is no cheat.
    trials = [
        sent
        for sent, honest in zip(forged, arena.honest(slots), strict=True)
        if sent.data not in (honest.data, arena.proved(honest).data)
    ]
    return verify_all(arena, trials)


def verify_honest(arena: Arena, slots: Sequence[int], dtype: str, number: int) -> list[AuditOutcome]:
    max_batch, threads = HONEST_SHAPES[number % len(HONEST_SHAPES)]
    torch.set_num_threads(threads)
    submissions = arena.sampled(slots, arena.engine(dtype=dtype, max_batch=max_batch))
    torch.set_num_threads(1)
    return verify_all(arena, submissions)


def verify_all(arena: Arena, submissions: Sequence[Submission]) -> list[AuditOutcome]:
    auditable = [sent for sent in submissions if all(row.output_tokens for row in sent.rollouts)]
    arena.score(*auditable)  # all in one go; the verify finds them remembered
    return [arena.verify(sent) for sent in submissions]


def report(arena: Arena, honest: Sequence[AuditOutcome], outcomes: dict[str, list[AuditOutcome]]) -> dict[str, Any]:
    rejected = sum(bool(outcome.reasons) for outcome in honest)
    limits = arena.limits(arena.validator.numerics_class)
    summaries = {name: summary(trials, limits) for name, trials in outcomes.items()}
    for name, numbers in summaries.items():
        say(f"{name}: {numbers}")
    classes = arena.calibration.classes
    groups = [group for outcome in honest for group in outcome.groups]
    return {
        "benchmark": "detection",
        "model": arena.calibration.model,
        "honest_submissions": len(honest),
        "honest_tokens": sum(outcome.tokens for outcome in honest),
        "honest_rejected": rejected,
        "honest_false_reject_upper95": round(binomial_upper(rejected, len(honest)), 6),
        "honest_groups": len(groups),
        "honest_groups_rejected": sum(bool(group.reasons) for group in groups),
        "honest_largest_drift": round(largest_drift(honest), 3),
        "honest_margin_max": max(outcome.metrics.margin_max for outcome in honest if outcome.metrics),
        "cheats": {name: summaries[name] for name in CHEATS | ADAPTER_CHEATS if name in summaries},
        "slow_cheats": {name: summaries[name] for name in SLOW_CHEATS | ADAPTER_SLOW_CHEATS if name in summaries},
        "residual_bits_per_1000_tokens": {
            name: known.evidence.residual_bits_per_1000_tokens for name, known in classes.items()
        },
        "bytes_per_chunk": proof_bytes(TOP_K),
    }


def summary(outcomes: Sequence[AuditOutcome], limits: Limits) -> dict[str, Any]:
    if not outcomes:
        return {"trials": 0}

    caught = [outcome for outcome in outcomes if outcome.reasons]
    stages = Counter(str(reason) for outcome in caught for reason in outcome.reasons)
    careers = [career(outcomes, limits, random.Random(number)) for number in range(CAREERS)]
    groups = [group for outcome in outcomes for group in outcome.groups]
    as_coarse = [outcome for outcome in outcomes if outcome.metrics_if_coarse]
    return {
        "trials": len(outcomes),
        "missed": len(outcomes) - len(caught),
        "missed_upper95": round(binomial_upper(len(outcomes) - len(caught), len(outcomes)), 4),
        "proofs": sum(most_severe(list(outcome.reasons)) is Severity.PROOF for outcome in outcomes),
        "stage": stages.most_common(1)[0][0] if stages else None,
        "needs_audit": any(outcome.metrics for outcome in outcomes),
        "groups_found": round(statistics.fmean(bool(group.reasons) for group in groups), 4) if groups else None,
        "tokens_needed": mean_or_none([end.tokens for end in careers]),
        "submissions_until_ban_at_floor": mean_or_none([end.banned for end in careers]),
        "submissions_until_ban_at_floor_median": median_or_none([end.banned for end in careers]),
        "submissions_until_ban_at_floor_worst95": worst_or_none([end.banned for end in careers]),
        "submissions_until_unused_at_floor": mean_or_none([end.unused for end in careers]),
        f"missed_if_declared_{COARSE_CLASS}": (
            sum(not outcome.reasons_if_coarse for outcome in as_coarse) if as_coarse else None
        ),
    }


@dataclass(frozen=True)
class Career:
    """How many submissions a proven key made until its work was no longer used, and until it was banned."""

    unused: int | None
    banned: int | None
    tokens: int | None
    """Audited until the ban."""


def career(outcomes: Sequence[AuditOutcome], limits: Limits, draw: random.Random) -> Career:
    """Cheats sampled from the trials, verified as the coordinator would: claims always, each group by a draw of its own."""
    record = trust.TrustRecord("active", clean_audits=round(TRUST.probation_audits / FLOOR))
    sums: drift.Sums = ()
    total, unused, tokens = 0.0, None, 0
    for number in range(1, LONGEST_CAREER + 1):
        outcome = draw.choice(outcomes)
        rate = max(FLOOR, trust.audit_rate(record, TRUST))
        drawn = [group for group in outcome.groups if draw.random() < rate]
        if outcome.metrics is not None and not drawn:
            continue
        found = joint(drawn, limits) if drawn else None
        tokens += found.metrics.tokens if found else outcome.tokens
        severity = most_severe(list(found.reasons if found else outcome.reasons))
        sums = drift.after(sums, found.metrics.drift_llrs if found else ())
        before, total = total, drift.total(sums)
        if severity is Severity.PROOF or drift.level(total) == "cheating":
            return Career(unused or number, number, tokens)
        anomalies = (severity is Severity.ANOMALY) + drift.became_suspicious(before, total)
        for event in ["anomaly"] * anomalies or ["clean_audit"]:
            record = trust.after(record, event, TRUST, len(drawn) / max(1, len(outcome.groups)))  # type: ignore[arg-type]
        if unused is None and not trust.is_usable(record, TRUST):
            unused = number
        if unused is not None and number > unused + 100:
            break
    return Career(unused, None, None)


def mean_or_none(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 1) if len(known) == len(values) else None


def median_or_none(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def worst_or_none(values: Sequence[int | None]) -> int | None:
    known = sorted(value for value in values if value is not None)
    return known[int(0.95 * len(known))] if len(known) == len(values) else None


def largest_drift(outcomes: Sequence[AuditOutcome]) -> float:
    """As if one worker had made them all."""
    sums: drift.Sums = ()
    largest = 0.0
    for outcome in outcomes:
        sums = drift.after(sums, outcome.metrics.drift_llrs if outcome.metrics else ())
        largest = max(largest, drift.total(sums))
    return largest


def batches(count: int, first: int = 0) -> Iterator[list[int]]:
    for start in range(0, count, BATCH_SLOTS):
        yield list(range(first + start, first + min(start + BATCH_SLOTS, count)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
