"""What the run's rules make of measured draws: limits from honest ones, then audits, the sequential test, and error rates.

`true_proofs` is a cheat that proves with the true model: only its draws can give it away. `own_proofs` is one whose commitments and
log-probabilities are those of what it computed.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.coarse.draws import Draws
from shoal.coordinator.rules import drift
from shoal.evaluation.statistics import binomial_upper, poisson_allowance, poisson_upper
from shoal.policy.engine import Scored
from shoal.proofs.commitments import CHUNK_TOKENS
from shoal.validation import flips, ranks
from shoal.validation.calibration.evidence import (
    SMALLEST_FLIP_SCALE,
    bounded_scales,
    fit_of,
    logprob_limit,
    margin_limit,
)
from shoal.validation.calibration.limits import FALSE_DRIFTS

AUC_TOKENS = 1000
BLOCKS = 400
CAREERS = 200
LONGEST_CAREER = 200_000
"""Audited tokens after which a career counts as not banned."""
NOISE = 1e-4


@dataclass(frozen=True)
class Bounds:
    """As a calibration sets them; the median of mantissa errors is left out."""

    scale: float
    scale_likely: float
    margin_max: float
    flips_per_token: float
    mismatches: float
    mantissa_mean: float
    logprob_error: float
    ladders: list[ranks.Ladder]

    @classmethod
    def of(cls, honest: Draws) -> "Bounds":
        worst_logprob = float(np.abs(honest.logprob_errors).max())
        likely, upper = bounded_scales(flips.Draws.of([scored(honest)]), worst_logprob)
        return cls(
            scale=max(SMALLEST_FLIP_SCALE, upper),
            scale_likely=likely,
            margin_max=margin_limit(float(honest.margins.max()), upper),
            flips_per_token=poisson_upper(int((honest.margins > NOISE).sum())) / len(honest.margins),
            mismatches=2 * float(honest.chunks[:, 0].max()) + 4,
            mantissa_mean=2 * float(honest.chunks[:, 2].max()) + 1,
            logprob_error=logprob_limit(worst_logprob, upper),
            ladders=ranks.ladders(distances(honest), chunk_sizes(honest)),
        )


def distances(draws: Draws) -> list[float]:
    return [float(row[2] + 0.5 * (row[0] + row[1])) for row in draws.chunks]


def chunk_sizes(draws: Draws) -> list[int]:
    """Tokens of each chunk: a completion begins where the index is 0."""
    starts = [*np.flatnonzero(draws.places == 0).tolist(), len(draws.places)]
    lengths = np.diff(starts).tolist()
    return [min(CHUNK_TOKENS, length - first) for length in lengths for first in range(0, length, CHUNK_TOKENS)]


def scored(draws: Draws) -> Scored:
    count = len(draws.margins)
    rivals = torch.from_numpy(draws.rivals)
    return Scored(torch.from_numpy(draws.margins), torch.zeros(count), torch.zeros(count, 1), rivals)


@dataclass(frozen=True)
class Audit:
    """One submission before the rules."""

    tokens: int
    llrs: Sequence[float]
    """Of the draws."""
    commitment_llr: float
    sampling: bool
    """A margin that no honest worker has: a proof."""
    many_flips: bool
    commitments: bool
    """A proof, against anyone who commits to what it computed."""
    logprobs: bool


def audits(draws: Draws, bounds: Bounds) -> list[Audit]:
    return [audit(draws.of(number), bounds) for number in np.unique(draws.submissions)]


def audit(draws: Draws, bounds: Bounds) -> Audit:
    tokens, lost = len(draws.margins), int((draws.margins > NOISE).sum())
    wrong = draws.chunks[:, 0] + draws.chunks[:, 1] > np.ceil(bounds.mismatches * draws.chunks[:, 3] / 128)
    return Audit(
        tokens,
        flips.evidence([scored(draws)], bounds.scale),
        ranks.evidence(distances(draws), chunk_sizes(draws), bounds.ladders),
        sampling=bool(draws.margins.max() > bounds.margin_max),
        many_flips=lost > poisson_allowance(bounds.flips_per_token * tokens, FALSE_DRIFTS),
        commitments=bool((wrong | (draws.chunks[:, 2] > bounds.mantissa_mean)).any()),
        logprobs=bool(np.abs(draws.logprob_errors).max() > bounds.logprob_error),
    )


def rejected(one: Audit) -> bool:
    return one.sampling or one.many_flips or one.commitments or one.logprobs


def honest_report(found: Sequence[Audit]) -> dict[str, Any]:
    sums, largest = drift.Sums(), 0.0
    for one in found:
        sums = drift.after(sums, [*one.llrs, one.commitment_llr])
        largest = max(largest, drift.total(sums))
    bad = sum(map(rejected, found))
    means = np.exp(np.array([[*one.llrs, one.commitment_llr] for one in found])).mean(0)
    return {
        "honest_submissions": len(found),
        "honest_tokens": sum(one.tokens for one in found),
        "honest_rejected": bad,
        "honest_false_reject_upper95": round(binomial_upper(bad, len(found)), 5),
        "honest_drift_largest": round(largest, 2),
        "honest_mean_ratio": {
            name: round(float(mean), 3) for name, mean in zip([*flips.ALTERNATIVES, "commitments"], means, strict=True)
        },
    }


def cheat_report(cheat: Sequence[Audit], honest: Sequence[Audit], draws: Draws) -> dict[str, Any]:
    lost = draws.margins[draws.margins > NOISE]
    near = draws.rivals[:, 0] < 0.5
    errors = np.abs(draws.pair_errors[near]) if len(draws.pair_errors) else np.zeros(0)
    return {
        "tokens": len(draws.margins),
        "flips_per_1000": round(1000 * len(lost) / len(draws.margins), 2),
        "flip_margin_mean": round(float(lost.mean()), 4) if len(lost) else 0.0,
        "margin_max": round(float(draws.margins.max()), 3),
        "pair_error_median": round(float(np.median(errors)), 4) if len(errors) else None,
        "pair_error_99": round(float(np.quantile(errors, 0.99)), 4) if len(errors) else None,
        "commitment_mantissa_mean": round(float(draws.chunks[:, 2].mean()), 3),
        "auc_at_1000_tokens": round(auc(blocks(cheat), blocks(honest)), 4),
        "llr_per_1000_tokens": {
            name: round(1000 * sum(one.llrs[at] for one in cheat) / sum(one.tokens for one in cheat), 2)
            for at, name in enumerate(flips.ALTERNATIVES)
        },
        "commitment_llr_per_1000_tokens": round(
            1000 * sum(one.commitment_llr for one in cheat) / sum(one.tokens for one in cheat), 2
        ),
        "tokens_to_ban": {
            "true_proofs": until_ban(cheat, own_proofs=False),
            "own_proofs": until_ban(cheat, own_proofs=True),
        },
    }


def until_ban(found: Sequence[Audit], *, own_proofs: bool) -> dict[str, Any]:
    """Audited tokens until the ban, over careers whose submissions are drawn from those that were measured."""
    ends = [_career(found, own_proofs, random.Random(number)) for number in range(CAREERS)]
    banned = sorted(end for end in ends if end is not None)
    if len(banned) < CAREERS:
        return {"median": None, "banned": len(banned), "of": CAREERS, "within": LONGEST_CAREER}
    return {"median": round(statistics.median(banned)), "worst95": banned[int(0.95 * CAREERS)]}


def _career(found: Sequence[Audit], own_proofs: bool, draw: random.Random) -> int | None:
    sums, tokens = drift.Sums(), 0
    while tokens < LONGEST_CAREER:
        one = draw.choice(found)
        tokens += one.tokens
        # Anyone who proves with the true model has commitments like honest ones, or better: half of their ratio, 1 / 2, each.
        sums = drift.after(sums, [*one.llrs, one.commitment_llr if own_proofs else -1.0])
        proof = one.sampling or (own_proofs and one.commitments)
        if proof or drift.level(drift.total(sums)) == "cheating":
            return tokens
    return None


def blocks(found: Sequence[Audit]) -> list[float]:
    """The mean likelihood ratio of about 1,000 tokens, many times drawn."""
    values = []
    for number in range(BLOCKS):
        draw, tokens, llrs = random.Random(number), 0, np.zeros(len(flips.ALTERNATIVES))
        while tokens < AUC_TOKENS:
            one = draw.choice(found)
            share = min(1.0, (AUC_TOKENS - tokens) / one.tokens)
            tokens, llrs = tokens + one.tokens, llrs + share * np.array(one.llrs)
        values.append(float(np.logaddexp.reduce(llrs)))
    return values


def auc(cheat: Sequence[float], honest: Sequence[float]) -> float:
    order = np.sort(np.array(honest))
    values = np.array(cheat)
    below, upto = np.searchsorted(order, values, "left"), np.searchsorted(order, values, "right")
    return float(((below + upto) / 2).mean() / len(order))


def fit_table(honest: Draws, scale: float) -> list[dict[str, float]]:
    """Close draws by width in scales: how many were lost, and how many the fitted scale expects."""
    return [one.model_dump() for one in fit_of(flips.Draws.of([scored(honest)]), scale)]


def by_position(draws: Draws, edges: Sequence[int]) -> list[dict[str, Any]]:
    """Does rounding grow with position? Errors of close draws and flips, by the index of the token."""
    rows, first = [], 0
    for edge in edges:
        here = (draws.places >= first) & (draws.places < edge)
        if here.any():
            near = here & (draws.rivals[:, 0] < 1.0)
            errors = np.abs(draws.pair_errors[near])
            part = flips.Draws.of([scored(_only(draws, here))])
            likely, upper = flips.fit_scale(part)
            rows.append(
                {
                    "positions": f"{first}-{edge - 1}",
                    "tokens": int(here.sum()),
                    "flips_per_1000": round(1000 * float((draws.margins[here] > NOISE).mean()), 2),
                    "margin_max": round(float(draws.margins[here].max()), 4),
                    "pair_error_median": round(float(np.median(errors)), 4),
                    "pair_error_99": round(float(np.quantile(errors, 0.99)), 4),
                    "scale_likely": round(likely, 4),
                    "scale_upper": round(upper, 4),
                }
            )
        first = edge
    return rows


def _only(draws: Draws, tokens: Any) -> Draws:
    return Draws(
        draws.margins[tokens],
        draws.rivals[tokens],
        draws.logprob_errors[tokens],
        draws.places[tokens],
        draws.submissions[tokens],
        draws.pair_errors[tokens],
        draws.chunks,
        draws.chunk_submissions,
    )
