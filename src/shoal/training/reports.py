"""What a training step says about itself: one flat record, equal on every rank.

Rewards, ages and lengths come from the groups, which every rank holds; token statistics are summed over micro-batches and
reduced over ranks once per step. A fraction over nothing is 0; a mean over nothing that a guard reads is absent.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from shoal.training.model.distributed import World
from shoal.training.objective.losses import TokenBatch, TokenLoss, k3_divergence
from shoal.training.packing.samples import Group

SUMS = (
    "tokens", "loss", "policy_loss", "ratio", "entropy", "kl_update", "kl_reference", "kl_behaviour", "behaviour_tokens",
    "correction", "raised_tokens", "raised_clipped", "lowered_tokens", "lowered_clipped",
)  # fmt: skip

OF_EMPTY_STEP = (
    "step", "policy_version", "groups", "samples", "trained_tokens", "optimiser_steps",
    "old_logprobs_s", "update_s", "step_s",
)  # fmt: skip
RUN_TOKENS, FEWEST_RUNS, DISTINCT_SHARE = 4, 16, 0.5


@dataclass
class StepReport:
    """EventLog of one step; means are per trained token unless the name says otherwise."""

    step: int
    policy_version: int = 0
    groups: int = 0
    samples: int = 0
    trained_tokens: int = 0
    reward_mean: float = 0.0
    reward_std: float = 0.0
    task_reward_mean: float = 0.0
    length_term_mean: float = 0.0
    output_length_mean: float = 0.0
    observations_mean: float = 0.0
    """Observations of environments per completion."""
    truncation_rate: float = 0.0
    repetition_rate: float = 0.0
    zero_signal_fraction: float = 0.0
    age_mean: float = 0.0
    age_histogram: dict[int, int] = field(default_factory=dict)
    loss: float = 0.0
    policy_loss: float = 0.0
    entropy: float = 0.0
    ratio_mean: float = 0.0
    ratio_max: float = 0.0
    clip_fraction_positive: float = 0.0
    clip_fraction_negative: float = 0.0
    kl_update: float = 0.0
    kl_reference: float = 0.0
    kl_behaviour: float | None = None
    """None where no validator computed log-probabilities of the batch: then nothing is known about the lag."""
    behaviour_fraction: float = 0.0
    correction_mean: float = 0.0
    grad_norm_mean: float = 0.0
    grad_norm_max: float = 0.0
    grad_clip_fraction: float = 0.0
    learning_rate: float = 0.0
    optimiser_steps: int = 0
    tokens_per_s: float = 0.0
    old_logprobs_s: float = 0.0
    """All that comes before the first update: its gradient too, whose forward pass gives log-probabilities of its part."""
    update_s: float = 0.0
    step_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Without what was not measured: a step without samples has counts and times, and no means."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return values if self.samples else {name: values[name] for name in OF_EMPTY_STEP}


class TokenSums:
    """Running sums over trained tokens, on the device of the model, so that no micro-batch waits for a copy."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device if device.type != "mps" else "cpu")
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=self._sums.device)

    @torch.no_grad()
    def add(self, **values: Tensor) -> None:
        row = [values[name].sum().double() if name in values else self._sums.new_zeros(()) for name in SUMS]
        self._sums += torch.stack(row)
        if values["ratio"].numel():
            self._ratio_max = torch.maximum(self._ratio_max, values["ratio"].max().double())

    def reduce(self, world: World) -> dict[str, float]:
        totals = dict(zip(SUMS, world.sum(self._sums).tolist(), strict=True))
        totals["ratio_max"] = float(world.max(self._ratio_max))
        return totals


def token_statistics(
    tokens: TokenBatch, entropies_N: Tensor, behaviour_N: Tensor, loss: TokenLoss
) -> dict[str, Tensor]:
    """Per-token values to sum, without gradients."""
    logprobs_N, old_N = tokens.logprobs_N.detach(), tokens.old_logprobs_N
    known = ~behaviour_N.isnan()
    raised, lowered = tokens.advantages_N > 0, tokens.advantages_N < 0
    return {
        "tokens": torch.ones_like(logprobs_N),
        "ratio": torch.exp(logprobs_N - old_N),
        "entropy": entropies_N.detach(),
        "kl_update": k3_divergence(old_N, logprobs_N),
        "kl_behaviour": torch.where(known, k3_divergence(behaviour_N, old_N), 0.0),
        "behaviour_tokens": known,
        "raised_tokens": raised,
        "raised_clipped": raised & loss.clipped_N,
        "lowered_tokens": lowered,
        "lowered_clipped": lowered & loss.clipped_N,
    }


def group_metrics(step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What a report says about the batch, before anything is trained."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    ages = [step - sample.policy_version for sample in samples]
    task_reward_mean = fmean(sample.task_reward for sample in samples)
    return {
        "step": step,
        "policy_version": step + 1,
        "groups": len(groups),
        "samples": len(samples),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "task_reward_mean": task_reward_mean,
        "length_term_mean": float(rewards.mean()) - task_reward_mean,
        "output_length_mean": fmean(sample.sampled_count for sample in samples),
        "observations_mean": fmean((len(sample.lengths) - 1) / 2 for sample in samples),
        "truncation_rate": fmean(sample.truncated for sample in samples),
        "repetition_rate": fmean(repeats_itself(sample.sampled_tokens) for sample in samples),
        "zero_signal_fraction": fmean(not any(values) for values in advantages),
        "age_mean": fmean(ages),
        "age_histogram": dict(sorted(Counter(ages).items())),
    }


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether most runs of four tokens occurred before in the same completion; a short one never repeats itself."""
    runs = [tuple(tokens[start : start + RUN_TOKENS]) for start in range(len(tokens) - RUN_TOKENS + 1)]
    return len(runs) >= FEWEST_RUNS and len(set(runs)) < DISTINCT_SHARE * len(runs)


def token_metrics(totals: dict[str, float]) -> dict[str, Any]:
    """Means per trained token from sums over all ranks."""
    tokens, known = totals["tokens"], totals["behaviour_tokens"]
    means = {
        name: _share(totals[name], tokens) for name in ("loss", "policy_loss", "entropy", "kl_update", "kl_reference")
    }
    return means | {
        "ratio_mean": _share(totals["ratio"], tokens),
        "ratio_max": totals["ratio_max"],
        "correction_mean": _share(totals["correction"], tokens),
        "kl_behaviour": totals["kl_behaviour"] / known if known else None,
        "behaviour_fraction": _share(known, tokens),
        "clip_fraction_positive": _share(totals["raised_clipped"], totals["raised_tokens"]),
        "clip_fraction_negative": _share(totals["lowered_clipped"], totals["lowered_tokens"]),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
