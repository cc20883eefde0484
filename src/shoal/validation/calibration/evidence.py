"""From measured work to limits and their evidence: what honest numerics did, and how the limits did on other work. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from shoal.coordinator.rules import drift
from shoal.evaluation.statistics import binomial_upper, poisson_upper
from shoal.policy.engine import Scored
from shoal.proofs.commitments import ChunkDifference, compare_chunks, split_chunks
from shoal.protocol.api import AuditMetrics
from shoal.validation.calibration.limits import Evidence, FlipBin, Forgery, Limits
from shoal.validation.calibration.work import Sample
from shoal.validation.checks import compare
from shoal.validation.flips import TAIL_WIDTH, Draws, fit_scale, log_likelihoods
from shoal.validation.ranks import distance, ladders

SMALLEST_NOISE = 1e-4
"""Below this a margin is indistinguishable from the last bits of an fp32 sum on another machine."""
SMALLEST_FLIP_SCALE = 8e-4
FIT_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""In scales: widths of close draws at which the fit is shown."""
LARGEST_GAP = 1e9
"""JSON has no infinity."""
SMALLEST_MARGIN_MAX = 2.5e-3
SMALLEST_LOGPROB_ERROR = 1e-3
TAIL_DEVIATIONS = 6.0
WORST_FACTOR = 3.0
"""From the worst honest margin seen to the limit: errors of rounding have Gaussian tails, so that no sample comes near."""


@dataclass
class Honest:
    """Honest work, token by token and chunk by chunk."""

    margins: list[torch.Tensor] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    """Without states."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    differences: list[ChunkDifference] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    """Tokens of each."""
    logprob_error: float = 0.0

    def add(self, sample: Sample) -> None:
        self.margins += [row.margins for row in sample.scored]
        self.scored += [replace(row, states=row.states[:0]) for row in sample.scored]
        self.logprobs += [row.logprobs for row in sample.scored]
        claimed = torch.tensor([value for completion in sample.completions for value in completion.logprobs])
        error = (claimed - torch.cat([row.logprobs for row in sample.scored])).abs().max()
        self.logprob_error = max(self.logprob_error, float(error))
        proofs = [proof for completion in sample.completions for proof in completion.proofs]
        chunks = [chunk for row in sample.scored for chunk in split_chunks(row.states)]
        self.differences += compare_chunks(proofs, chunks)
        self.chunk_sizes += [len(chunk) for chunk in chunks]

    @property
    def tokens(self) -> int:
        return sum(margin.numel() for margin in self.margins)

    @property
    def margin_max(self) -> float:
        return float(torch.cat(self.margins).max())

    @property
    def flips(self) -> torch.Tensor:
        """Margins of the rounding flips."""
        margins = torch.cat(self.margins).double()
        return margins[margins > SMALLEST_NOISE]

    @cached_property
    def draws(self) -> Draws:
        return Draws.of(self.scored)

    @cached_property
    def flip_scales(self) -> tuple[float, float]:
        """The most likely scale of the errors, and what they stay below."""
        return bounded_scales(self.draws, self.logprob_error)

    @property
    def tie_density(self) -> float:
        return float(1 - torch.cat(self.logprobs).double().exp().mean())

    def worst(self, name: str) -> float:
        return max(float(getattr(difference, name)) for difference in self.differences)


@dataclass
class Trials:
    """Submissions that went through the checks of an audit."""

    submissions: int = 0
    rejected: int = 0
    metrics: list[AuditMetrics] = field(default_factory=list)

    def add(self, sample: Sample, limits: Limits, size: int) -> None:
        for part in sample.submissions(size):
            proofs = [proof for row in part.completions for proof in row.proofs]
            findings, metrics = compare([row.logprobs for row in part.completions], proofs, part.scored, limits)
            self.submissions += 1
            self.rejected += bool(findings)
            self.metrics.append(metrics)

    def as_forgery(self) -> Forgery:
        metrics, missed = self.metrics, self.submissions - self.rejected
        return Forgery(
            submissions=self.submissions,
            missed=missed,
            missed_upper95=round(binomial_upper(missed, self.submissions), 6),
            margin_max=max(one.margin_max for one in metrics),
            flips_per_1000=1000 * sum(one.rounding_flips for one in metrics) / sum(one.tokens for one in metrics),
            exponent_mismatches=max(one.exponent_mismatches_max for one in metrics),
            mantissa_mean=max(one.mantissa_mean_max for one in metrics),
            drift_per_submission=max(map(sum, zip(*(one.drift_llrs for one in metrics), strict=True))) / len(metrics),
        )

    @property
    def largest_drift(self) -> float:
        """Of the sequential test, as if one key had sent them all, one after the other."""
        sums, largest = drift.Sums(), 0.0
        for one in self.metrics:
            sums = drift.after(sums, one.drift_llrs)
            largest = max(largest, drift.total(sums))
        return largest


def bounded_scales(draws: Draws, logprob_error: float) -> tuple[float, float]:
    """Flips are rare in exact numerics; there the largest error of a log-probability bounds the scale better than their absence."""
    likely, upper = fit_scale(draws)
    bound = min(upper, logprob_error)
    return min(likely, bound), bound


def margin_limit(worst: float, scale: float) -> float:
    """Beyond what was seen, and beyond what the tail of the fitted errors exceeds in one of 10¹⁰ tokens."""
    return max(SMALLEST_MARGIN_MAX, WORST_FACTOR * worst, TAIL_DEVIATIONS * TAIL_WIDTH * scale)


def logprob_limit(worst: float, scale: float) -> float:
    return max(SMALLEST_LOGPROB_ERROR, WORST_FACTOR * worst, TAIL_DEVIATIONS * TAIL_WIDTH * scale)


def limits_of(honest: Honest) -> Limits:
    return Limits(
        margin_max=margin_limit(honest.margin_max, honest.flip_scales[1]),
        margin_noise=SMALLEST_NOISE,
        flips_per_1000=1000 * poisson_upper(honest.flips.numel()) / honest.tokens,
        flip_scale=max(SMALLEST_FLIP_SCALE, honest.flip_scales[1]),
        exponent_mismatches=2 * int(honest.worst("exponent_mismatches")) + 4,
        mantissa_mean=2 * honest.worst("mantissa_mean") + 1.0,
        mantissa_median=2 * honest.worst("mantissa_median") + 1.0,
        logprob_error=logprob_limit(honest.logprob_error, honest.flip_scales[1]),
        commitment_ladders=ladders([distance(one) for one in honest.differences], honest.chunk_sizes),
    )


def evidence_of(limits: Limits, honest: Honest, tested: Trials, forged: Mapping[str, Trials]) -> Evidence:
    flips = honest.flips
    return Evidence(
        honest_tokens=honest.tokens,
        honest_chunks=len(honest.differences),
        honest_margin_max=honest.margin_max,
        honest_flips_per_1000=1000 * flips.numel() / honest.tokens,
        honest_flip_margin_mean=float(flips.mean()) if flips.numel() else 0.0,
        honest_flip_scale=honest.flip_scales[0],
        honest_flip_fit=fit_of(honest.draws, honest.flip_scales[0]),
        honest_drift_largest=tested.largest_drift,
        honest_exponent_mismatches=int(honest.worst("exponent_mismatches")),
        honest_mantissa_mean=honest.worst("mantissa_mean"),
        honest_logprob_error=honest.logprob_error,
        tie_density=honest.tie_density,
        honest_submissions=tested.submissions,
        honest_rejected=tested.rejected,
        honest_false_reject_upper95=round(binomial_upper(tested.rejected, tested.submissions), 6),
        residual_bits_per_1000_tokens=round(limits.residual_bits_per_1000(honest.tie_density), 4),
        forgeries={name: trials.as_forgery() for name, trials in forged.items()},
    )


def fit_of(draws: Draws, scale: float) -> list[FlipBin]:
    """Observed and expected flips by the width of the close draw; the last bin has all that are wider."""
    lost_N, expected_N = draws.rank_N > 0, _flip_probabilities(draws, scale)
    edges = [*(edge * scale for edge in FIT_EDGES), float("inf")]
    bins, below = [], 0.0
    for edge in edges:
        here_N = (draws.gaps_N2[:, 0] >= below) & (draws.gaps_N2[:, 0] < edge)
        bins.append(
            FlipBin(
                gap_below=min(edge, LARGEST_GAP),
                tokens=int(here_N.sum()),
                flips=int(lost_N[here_N].sum()),
                expected=round(float(expected_N[here_N].sum()), 3),
            )
        )
        below = edge
    return bins


def _flip_probabilities(draws: Draws, scale: float) -> torch.Tensor:
    kept = Draws(torch.zeros_like(draws.rank_N), draws.gaps_N2, draws.logit_gaps_N2)
    return 1 - log_likelihoods(kept, scale)[0].exp()
