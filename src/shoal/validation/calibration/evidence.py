"""From measured work to limits and their evidence: what honest numerics did, and how the limits did on other work. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shoal.evaluation.statistics import binomial_upper, poisson_upper
from shoal.proofs.commitments import ChunkDifference, compare_chunks, split_chunks
from shoal.protocol.api import AuditMetrics
from shoal.validation.calibration.limits import Evidence, Forgery, Limits
from shoal.validation.calibration.work import Sample
from shoal.validation.checks import compare

SMALLEST_NOISE = 1e-4
"""Below this a margin is indistinguishable from the last bits of an fp32 sum on another machine."""
SMALLEST_FLIP_MARGIN = 5e-4
SMALLEST_MARGIN_MAX = 2.5e-3
SMALLEST_LOGPROB_ERROR = 1e-3
WORST_FACTOR = 3.0
"""From the worst honest margin seen to the limit: errors of rounding have Gaussian tails, so that no sample comes near."""


@dataclass
class Honest:
    """Honest work, token by token and chunk by chunk."""

    margins: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    differences: list[ChunkDifference] = field(default_factory=list)
    logprob_error: float = 0.0

    def add(self, sample: Sample) -> None:
        self.margins += [row.margins for row in sample.scored]
        self.logprobs += [row.logprobs for row in sample.scored]
        claimed = torch.tensor([value for completion in sample.completions for value in completion.logprobs])
        error = (claimed - torch.cat([row.logprobs for row in sample.scored])).abs().max()
        self.logprob_error = max(self.logprob_error, float(error))
        proofs = [proof for completion in sample.completions for proof in completion.proofs]
        chunks = [chunk for row in sample.scored for chunk in split_chunks(row.states)]
        self.differences += compare_chunks(proofs, chunks)

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
            drift_per_submission=sum(one.drift_llr for one in metrics) / len(metrics),
        )


def limits_of(honest: Honest) -> Limits:
    flips = honest.flips
    # The mean of k exponential margins is known to about 1/√k; none seen leaves the smallest that counts.
    mean = float(flips.mean()) * (1 + 1.65 / flips.numel() ** 0.5) if flips.numel() else 0.0
    return Limits(
        margin_max=max(SMALLEST_MARGIN_MAX, WORST_FACTOR * honest.margin_max),
        margin_noise=SMALLEST_NOISE,
        flips_per_1000=1000 * poisson_upper(flips.numel()) / honest.tokens,
        flip_margin_mean=max(SMALLEST_FLIP_MARGIN, mean),
        exponent_mismatches=2 * int(honest.worst("exponent_mismatches")) + 4,
        mantissa_mean=2 * honest.worst("mantissa_mean") + 1.0,
        mantissa_median=2 * honest.worst("mantissa_median") + 1.0,
        logprob_error=max(SMALLEST_LOGPROB_ERROR, WORST_FACTOR * honest.logprob_error),
    )


def evidence_of(limits: Limits, honest: Honest, tested: Trials, forged: Mapping[str, Trials]) -> Evidence:
    flips = honest.flips
    return Evidence(
        honest_tokens=honest.tokens,
        honest_chunks=len(honest.differences),
        honest_margin_max=honest.margin_max,
        honest_flips_per_1000=1000 * flips.numel() / honest.tokens,
        honest_flip_margin_mean=float(flips.mean()) if flips.numel() else 0.0,
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
