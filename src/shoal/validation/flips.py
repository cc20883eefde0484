"""Likelihood ratios of rounding flips: whether honest numerics explain which tokens an audited worker drew.

In: of each token its margin and the gaps of the winner's two closest rivals (`Scored`), and the scale of the numerics class. Out:
one log-likelihood ratio for each alternative, which the coordinator adds up per key. Every close draw counts, whether it was lost
or kept, at its own width, so the ratios do not depend on how many of them a policy has. Honest work has an expected ratio of at
most 1 as long as the class's scale is not below the true one. One token adds at most LARGEST_LLR, however far an outlier lies.

Model: numerics move the score of a rival against the winner's by a random error, and a flip happens where it exceeds the gap. The
error is Gaussian with the class's scale, and TAIL_WIDTH times as wide in TAIL_SHARE of all cases: measured errors in bfloat16 have
a kurtosis of 4 to 9, and this one has 7.6.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shoal.policy.engine import Scored

TAIL_SHARE, TAIL_WIDTH = 0.05, 3.0
"""The most likely ones among a few, given 25,000 honest tokens of SmolLM2."""
LARGEST_LLR = 4.0
"""Per token; a ban takes at least four tokens that honest numerics hardly explain."""
LEAST_PROBABILITY = 1e-12
SCALES = torch.logspace(-5, 1, 601, dtype=torch.float64)
"""Among which a class's own is looked for."""
UPPER_LOSS = 1.92
"""Of log-likelihood, from the best scale to the upper end of its interval."""


@dataclass(frozen=True)
class Alternative:
    """Numerics `coarser` times as coarse as honest ones, and logits that are 1 + `tilt` times as far apart."""

    coarser: float = 1.0
    tilt: float = 0.0


ALTERNATIVES = {
    "coarser_x1.5": Alternative(coarser=1.5),
    "coarser_x2.5": Alternative(coarser=2.5),
    "coarser_x6": Alternative(coarser=6.0),
    "colder": Alternative(tilt=0.05),
    "hotter": Alternative(tilt=-0.05),
}
HONEST = Alternative()


@dataclass(frozen=True)
class Draws:
    """Sampled tokens: which of the first three the worker drew, and how far the second and third lay behind the first."""

    rank_N: Tensor  # 0 the winner, 1 its closest rival, 2 any other token
    gaps_N2: Tensor
    logit_gaps_N2: Tensor

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> "Draws":
        margins_N = torch.cat([row.margins for row in scored]).double().cpu()
        rivals_N4 = torch.cat([row.rivals for row in scored]).double().cpu()
        gaps_N2 = rivals_N4[:, :2].clamp_min(0.0)
        # Both are differences of the same fp32 scores: halfway between the gaps nothing is.
        beyond_N = margins_N > gaps_N2.mean(dim=-1)
        return cls((margins_N > 0).long() + ((margins_N > 0) & beyond_N).long(), gaps_N2, rivals_N4[:, 2:])

    def __len__(self) -> int:
        return self.rank_N.shape[0]


def log_likelihoods(draws: Draws, scale: float, alternative: Alternative = HONEST) -> Tensor:
    """Of each draw: the odds of losing to a rival are those of an error above its gap; the three outcomes add up to 1."""
    tilts_N2 = alternative.tilt * draws.logit_gaps_N2 if alternative.tilt else torch.zeros_like(draws.gaps_N2)
    lost_N2 = lost_probability(draws.gaps_N2 + tilts_N2.nan_to_num(), alternative.coarser * scale)
    odds_N3 = torch.cat([torch.ones(len(draws), 1, dtype=torch.float64), lost_N2 / (1 - lost_N2)], dim=-1)
    return (odds_N3 / odds_N3.sum(-1, keepdim=True)).gather(-1, draws.rank_N[:, None]).squeeze(-1).log()


def lost_probability(gaps: Tensor, scale: float) -> Tensor:
    """That an error exceeds a gap; never quite 0 or 1."""
    wide = torch.special.erfc(gaps / (scale * TAIL_WIDTH * math.sqrt(2)))
    core = torch.special.erfc(gaps / (scale * math.sqrt(2)))
    lost: Tensor = 0.5 * ((1 - TAIL_SHARE) * core + TAIL_SHARE * wide)
    return lost.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)


def ratios(draws: Draws, scale: float, alternatives: Iterable[Alternative]) -> Iterator[Tensor]:
    """Log-likelihood ratios of each draw against honest numerics, bounded above."""
    honest_N = log_likelihoods(draws, scale)
    for alternative in alternatives:
        yield (log_likelihoods(draws, scale, alternative) - honest_N).clamp_max(LARGEST_LLR)


def evidence(scored: Sequence[Scored], scale: float) -> list[float]:
    """Of all tokens together, in the order of ALTERNATIVES."""
    draws = close_draws(Draws.of(scored), scale)
    return [float(ratios_N.sum()) for ratios_N in ratios(draws, scale, ALTERNATIVES.values())]


def close_draws(draws: Draws, scale: float) -> Draws:
    """Draws that some alternative explains otherwise; the rest, most of them, have ratios of 1."""
    widest = 8 * TAIL_WIDTH * scale * max(alternative.coarser for alternative in ALTERNATIVES.values())
    tilted_N = (0.1 * draws.logit_gaps_N2.nan_to_num(posinf=0.0)).abs().amax(-1)
    near_N = (draws.rank_N > 0) | (draws.gaps_N2[:, 0] < widest + tilted_N)
    return Draws(draws.rank_N[near_N], draws.gaps_N2[near_N], draws.logit_gaps_N2[near_N])


def fit_scale(draws: Draws) -> tuple[float, float]:
    """The scale under which honest draws are most likely, and the upper end of its 95 % interval."""
    totals = torch.stack([log_likelihoods(draws, float(scale)).sum() for scale in SCALES])
    best = int(totals.argmax())
    likely = (totals >= totals[best] - UPPER_LOSS).nonzero().squeeze(-1)
    return float(SCALES[best]), float(SCALES[int(likely.max())])


@lru_cache(maxsize=1)
def steerable_gap() -> float:
    """In scales: the width up to which a worker may decide every close draw for good.

    Losing all ties below a width m and none above adds ∫ ratio(lost) up to m and ∫ ratio(kept) beyond. Where the sum of the most
    sensitive alternative is zero, the sequential test does not rise.
    """
    step = 1e-3
    gaps = torch.arange(step / 2, 400, step, dtype=torch.float64)
    lost = lost_probability(gaps, 1.0)
    widths = []
    for alternative in ALTERNATIVES.values():
        if alternative.tilt:
            continue
        other = lost_probability(gaps, alternative.coarser)
        gained = ((other / lost).log().cumsum(0)) * step
        kept = ((1 - other) / (1 - lost)).log()
        paid = (kept.sum() - kept.cumsum(0)) * step
        widths.append(float(gaps[int(((gained + paid) > 0).nonzero()[0])]))
    return min(widths)
