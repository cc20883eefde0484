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
from collections.abc import Sequence
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


def log_likelihoods(draws: Draws, scale: float, alternatives: Sequence[Alternative] = (HONEST,)) -> Tensor:
    """[A, N], of each draw under each of them: the odds of losing to a rival are those of an error above its gap; the three
    outcomes add up to 1."""
    scales_A = torch.tensor([scale * alternative.coarser for alternative in alternatives], dtype=torch.float64)
    tilts_A = torch.tensor([alternative.tilt for alternative in alternatives], dtype=torch.float64)
    tilts_AN2 = (tilts_A[:, None, None] * draws.logit_gaps_N2).nan_to_num()
    lost_AN2 = lost_probability(draws.gaps_N2 + tilts_AN2, scales_A[:, None, None])
    odds_AN3 = torch.nn.functional.pad(lost_AN2 / (1 - lost_AN2), (1, 0), value=1.0)
    drawn_AN1 = draws.rank_N[:, None].expand(len(alternatives), -1, 1)
    return (odds_AN3.gather(-1, drawn_AN1).squeeze(-1) / odds_AN3.sum(-1)).log()


def lost_probability(gaps: Tensor, scale: Tensor | float) -> Tensor:
    """That an error exceeds a gap; never quite 0 or 1."""
    widths = gaps / (scale * math.sqrt(2))
    core, wide = torch.special.erfc(widths), torch.special.erfc(widths / TAIL_WIDTH)
    lost: Tensor = 0.5 * ((1 - TAIL_SHARE) * core + TAIL_SHARE * wide)
    return lost.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)


def ratios(draws: Draws, scale: float, alternatives: Sequence[Alternative]) -> Tensor:
    """[A, N]: log-likelihood ratios of each draw against honest numerics, bounded above."""
    found_AN = log_likelihoods(draws, scale, [HONEST, *alternatives])
    return (found_AN[1:] - found_AN[0]).clamp_max(LARGEST_LLR)


def evidence(scored: Sequence[Scored], scale: float) -> list[float]:
    """Of all tokens together, in the order of ALTERNATIVES."""
    draws = close_draws(Draws.of(scored), scale)
    if not len(draws):  # most audits of float32 classes
        return [0.0] * len(ALTERNATIVES)
    sums: list[float] = ratios(draws, scale, [*ALTERNATIVES.values()]).sum(-1).tolist()
    return sums


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
