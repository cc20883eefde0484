"""From groups to mini-batches of bins: advantages, token weights, who is left out, who trains with whom.

Pure apart from tensor allocation. Every rank computes the same plan from the same groups and keeps its own bins; the
normaliser of a mini-batch counts all ranks' tokens, so no gradient depends on packing, micro-batching or world size.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import TrainingConfig
from shoal.training.objective.advantages import Advantage
from shoal.training.packing.bins import Bin, build_packed, build_padded
from shoal.training.packing.packing import group_by_prompt, pack, pack_padded
from shoal.training.packing.samples import Group, Sample

OVERLONG_BUFFER = 1024
"""Tokens before the limit over which `penalise` takes the reward down from 0 to −1."""


@dataclass(frozen=True)
class Member:
    """One completion that is trained."""

    sample: Sample
    advantage: float
    token_weight: float
    group: int = 0
    """Its place in the batch."""


@dataclass
class MicroBatch:
    """One bin with what the loss needs of each of its N trained tokens."""

    bin: Bin
    advantages_N: Tensor
    weights_N: Tensor
    behaviour_N: Tensor
    """NaN where no validator computed it."""
    groups_N: Tensor
    """Places of the groups in the batch."""
    old_N: Tensor | None = None
    reference_N: Tensor | None = None


@dataclass
class MiniBatch:
    """One optimiser step: this rank's bins, and the sum of token weights over all ranks."""

    micro_batches: list[MicroBatch]
    total_weight: float


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to limit − buffer, then linearly down to −1 at the limit (soft overlong punishment, arXiv 2503.14476)."""
    return -min(1.0, max(0, length - (limit - buffer)) / buffer)


def choose_members(
    groups: Sequence[Group], advantage: Advantage, config: TrainingConfig, max_new_tokens: int
) -> list[list[Member]]:
    """For each group the completions that are trained; advantages compare all of them, also those left out."""
    rewards = [torch.tensor([_reward(sample, config, max_new_tokens) for sample in group.samples]) for group in groups]
    chosen = []
    for number, (group, values) in enumerate(zip(groups, advantage(rewards), strict=True)):
        pairs = zip(group.samples, values.tolist(), strict=True)
        kept = [(sample, value) for sample, value in pairs if not (config.overlong == "mask" and sample.truncated)]
        chosen.append([Member(sample, value, _token_weight(sample, config), number) for sample, value in kept])
    return chosen


def _reward(sample: Sample, config: TrainingConfig, max_new_tokens: int) -> float:
    if config.overlong != "penalise":
        return sample.reward
    buffer = min(OVERLONG_BUFFER, max_new_tokens)
    return sample.reward + overlong_penalty(sample.sampled_count, max_new_tokens, buffer)


def _token_weight(sample: Sample, config: TrainingConfig) -> float:
    return 1.0 if config.loss_weighting == "token" else 1.0 / sample.sampled_count


def split_groups(groups: Sequence[list[Member]], parts: int, seed: int, step: int) -> list[list[Member]]:
    """Disjoint mini-batches of whole groups in an order that depends on seed and step only; empty ones are left out."""
    order = list(range(len(groups)))
    random.Random(f"{seed}/{step}").shuffle(order)
    split = [[member for index in order[part::parts] for member in groups[index]] for part in range(parts)]
    return [members for members in split if members]


def build_minibatch(
    members: Sequence[Member],
    capacity: int,
    *,
    packed: bool,
    rank: int,
    ranks: int,
    device: torch.device,
    attention: float = 0.0,
) -> MiniBatch:
    """`attention` is what a pair of positions costs, one token being 1; ranks get equal costs."""
    prompts = [member.sample.prompt_tokens for member in members]
    outputs = [member.sample.output_tokens for member in members]
    prompt_groups = group_by_prompt(prompts, outputs, capacity, share=packed)
    bins = (pack if packed else pack_padded)(prompt_groups, capacity, parts=ranks, attention=attention)[rank]
    build = build_packed if packed else build_padded
    lengths = [member.sample.lengths for member in members]
    micro_batches = [_micro_batch(build(chosen, prompts, outputs, lengths), members, device) for chosen in bins]
    return MiniBatch(micro_batches, sum(member.token_weight * member.sample.sampled_count for member in members))


def _micro_batch(bin: Bin, members: Sequence[Member], device: torch.device) -> MicroBatch:
    index_N = bin.member_N
    advantages = torch.tensor([member.advantage for member in members])
    weights = torch.tensor([member.token_weight for member in members])
    groups = torch.tensor([member.group for member in members])
    rows = index_N[bin.offset_N == 0].tolist()
    behaviour = [value for row in rows for value in _behaviour(members[row].sample)]
    return MicroBatch(
        bin=bin.to(device),
        advantages_N=advantages[index_N].to(device),
        weights_N=weights[index_N].to(device),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32).to(device),
        groups_N=groups[index_N].to(device),
    )


def _behaviour(sample: Sample) -> Sequence[float]:
    if sample.behaviour_logprobs is None:
        return [float("nan")] * sample.sampled_count
    return sample.behaviour_logprobs
