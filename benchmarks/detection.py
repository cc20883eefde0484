"""Honest workers and every cheat of tests/adversaries against the checks of an audit, on the bundled policy with the demo's slots.

A trial counts only if its file differs from the honest worker's file for the same slot. `missed` submissions passed every check;
`proofs` of the caught ones ban at once, the rest are anomalies. Slow cheats may pass single audits: their evidence is added up
by the coordinator's sequential test in the order of the trials, starting anew after each ban.
Defaults are a smoke of a minute or two; `--trials 300 --honest 2000` is the full measurement.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from adversaries.arena import Arena, Judgement, make_arena  # noqa: E402
from adversaries.cheats import CHEATS, SLOW_CHEATS, Cheat  # noqa: E402
from shoal.config import TrustConfig, load_config  # noqa: E402
from shoal.coordinator import drift  # noqa: E402
from shoal.proofs import TOP_K, proof_bytes  # noqa: E402
from shoal.protocol.verdicts import Weight, heaviest  # noqa: E402
from shoal.validation.rates import binomial_upper  # noqa: E402

BATCH_SLOTS = 4
AUDIT_FLOOR = TrustConfig().audit_floor
HONEST_SETTINGS = (("float32", 256), ("float32", 7), ("float32", 64))
"""Compute type and rows per batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="submissions per cheat")
    parser.add_argument("--honest", type=int, default=12, help="honest submissions in float32")
    parser.add_argument("--honest-bfloat16", type=int, default=0, help="honest submissions in bfloat16; slow on a CPU")
    parser.add_argument("--only", nargs="*", default=[], help="names of cheats; all without it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        arena = make_arena(Path(directory), load_config(ROOT / "src/shoal/demo.toml"))
        print(json.dumps(measure(arena, options)))


def measure(arena: Arena, options: argparse.Namespace) -> dict[str, Any]:
    started = time.process_time()
    honest = list(judge_honest(arena, options.honest, HONEST_SETTINGS))
    honest += judge_honest(arena, options.honest_bfloat16, (("bfloat16", 64),))
    rejected = sum(bool(judgement.reasons) for judgement in honest)
    say(f"honest: {rejected} of {len(honest)} rejected")

    def table(cheats: dict[str, Cheat]) -> dict[str, Any]:
        chosen = {name: cheat for name, cheat in cheats.items() if not options.only or name in options.only}
        return {name: judge_cheat(arena, name, cheat, options.trials) for name, cheat in chosen.items()}

    classes = arena.calibration.classes
    return {
        "benchmark": "detection",
        "honest_submissions": len(honest),
        "honest_bfloat16_submissions": options.honest_bfloat16,
        "honest_tokens": sum(judgement.tokens for judgement in honest),
        "honest_rejected": rejected,
        "honest_false_reject_upper95": round(binomial_upper(rejected, len(honest)), 6),
        "honest_largest_drift": round(largest_drift(honest), 3),
        "cheats": table(CHEATS),
        "slow_cheats": table(SLOW_CHEATS),
        "residual_bits_per_1000_tokens": {
            name: known.evidence.residual_bits_per_1000_tokens for name, known in classes.items()
        },
        "bytes_per_chunk": proof_bytes(TOP_K),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def judge_honest(arena: Arena, count: int, settings: Sequence[tuple[str, int]]) -> Iterator[Judgement]:
    """Honest submissions of fresh slots, in batches of different shapes."""
    for number, slots in enumerate(batches(count, first=10_000)):
        dtype, max_batch = settings[number % len(settings)]
        for submission in arena.sampled(slots, arena.engine(dtype=dtype, max_batch=max_batch)):
            yield arena.judge(submission)


def judge_cheat(arena: Arena, name: str, cheat: Cheat, trials: int) -> dict[str, Any]:
    judged: list[Judgement] = []
    for slots in batches(trials):
        for honest, forged in zip(arena.honest(slots), cheat(arena, slots), strict=True):
            if forged.data != honest.data:
                judged.append(arena.judge(forged))
    result = summary(judged)
    say(f"{name}: {result}")
    return result


def summary(judged: Sequence[Judgement]) -> dict[str, Any]:
    if not judged:
        return {"trials": 0}

    caught = [judgement for judgement in judged if judgement.reasons]
    proofs = sum(heaviest(list(judgement.reasons)) is Weight.PROOF for judgement in judged)
    stages = Counter(str(reason) for judgement in caught for reason in judgement.reasons)
    tokens = statistics.mean(judgement.tokens for judgement in judged)
    audits = audits_until_ban(judged)
    return {
        "trials": len(judged),
        "missed": len(judged) - len(caught),
        "missed_upper95": round(binomial_upper(len(judged) - len(caught), len(judged)), 4),
        "proofs": proofs,
        "stage": stages.most_common(1)[0][0] if stages else None,
        "tokens_needed": round(tokens * audits) if audits else None,
        "audits_until_ban": round(audits, 2) if audits else None,
        "submissions_until_ban_at_floor": round(audits / AUDIT_FLOOR, 1) if audits else None,
    }


def audits_until_ban(judged: Sequence[Judgement]) -> float | None:
    """Mean number of audits until a proof, or the sequential test, bans; None if these trials never got there."""
    bans, total = 0, 0.0
    for judgement in judged:
        total = drift.after(total, judgement.figures.drift if judgement.figures else 0.0)
        weight = heaviest(list(judgement.reasons))
        if weight is Weight.PROOF or drift.standing(total) == "cheating":
            bans, total = bans + 1, 0.0
    return len(judged) / bans if bans else None


def largest_drift(judged: Sequence[Judgement]) -> float:
    """As if one worker had made them all."""
    total, largest = 0.0, 0.0
    for judgement in judged:
        total = drift.after(total, judgement.figures.drift if judgement.figures else 0.0)
        largest = max(largest, total)
    return largest


def batches(count: int, first: int = 0) -> Iterator[list[int]]:
    for start in range(0, count, BATCH_SLOTS):
        yield list(range(first + start, first + min(start + BATCH_SLOTS, count)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
