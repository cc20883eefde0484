"""Screening of a proposed batch: one statistic per group, before the first update.

z = (Σ log p + Σ H) / √Σ Var over the tokens of a group, where H is the entropy and Var the variance of log p under the trainer's
policy at the run's temperature. A group that this policy sampled has mean 0 and variance 1, whatever its task. The coordinator
holds back and audits groups whose statistic no honest group has, and records the rest; the statistics themselves are not kept.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shoal.errors import RefusedError
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.training.asking import ask_as_one
from shoal.training.model.distributed import World
from shoal.training.objective.losses import k3_divergence
from shoal.training.packing.batch import MicroBatch
from shoal.training.packing.samples import Group

LARGEST = 1e9
"""Stands for everything that is not a number."""


class GroupScores:
    """Sums over the tokens of each group, on the device of the model; every rank adds those of its own bins."""

    def __init__(self, groups: int, device: torch.device) -> None:
        place = device if device.type != "mps" else torch.device("cpu")
        self._deviations = torch.zeros(groups, dtype=torch.float64, device=place)
        self._variances = torch.zeros_like(self._deviations)
        self._lag = torch.zeros(2, dtype=torch.float64, device=place)

    @torch.no_grad()
    def add(self, micro_batch: MicroBatch, logprobs_N: Tensor, entropies_N: Tensor, variances_N: Tensor) -> None:
        place = self._deviations.device
        groups_N, behaviour_N = micro_batch.groups_N.to(place), micro_batch.behaviour_N
        self._deviations.index_add_(0, groups_N, (logprobs_N + entropies_N).detach().double().to(place))
        self._variances.index_add_(0, groups_N, variances_N.double().to(place))
        known = ~behaviour_N.isnan()
        divergence_N = torch.where(known, k3_divergence(behaviour_N, logprobs_N.detach()), 0.0)
        self._lag += torch.stack([divergence_N.sum(), known.sum()]).to(self._lag)

    def statistics(self, world: World) -> list[float]:
        """z of each group."""
        deviations, variances = world.sum(self._deviations).tolist(), world.sum(self._variances).tolist()
        return [statistic(deviation, variance) for deviation, variance in zip(deviations, variances, strict=True)]

    def lag(self, world: World) -> float | None:
        """Mean divergence per token between the policy and the verified behaviour of the workers; none without any."""
        total, known = world.sum(self._lag).tolist()
        return total / known if known else None


def statistic(deviation: float, variance: float) -> float:
    """A policy that is sure of every token has no spread: then any deviation is too large."""
    if not math.isfinite(deviation) or not math.isfinite(variance):
        return LARGEST
    if variance <= 0.0:
        return 0.0 if abs(deviation) < 1e-6 else math.copysign(LARGEST, deviation)
    return max(-LARGEST, min(LARGEST, deviation / math.sqrt(variance)))


class Screening:
    """What a trainer does with the batch of a step until it is recorded: reports statistics, takes the list that comes back."""

    def __init__(
        self,
        client: CoordinatorClient,
        world: World,
        batch: api.BatchRecord,
        fetch: Callable[[api.BatchRecord], Iterable[Group]],
    ) -> None:
        self.client, self.world, self.batch, self._fetch = client, world, batch, fetch

    def __call__(self, statistics: Sequence[float]) -> list[Group] | None:
        """The groups to train on instead; None if the batch is recorded as it is."""
        if self.batch.state == "recorded":
            return None
        before = self.batch
        self.batch = self._report(statistics)
        if self.batch.state == "recorded" and _names(self.batch) == _names(before):
            return None
        return list(self._fetch(self.batch))

    def _report(self, statistics: Sequence[float]) -> api.BatchRecord:
        """The main rank reports; all ranks go on with its answer."""
        batch, values = self.batch, dict(zip(_names(self.batch), statistics, strict=True))
        body = api.ScreeningBody(epoch=batch.epoch, step=batch.step, attempt=batch.attempt, statistics=values)
        return ask_as_one(self.world, api.BatchRecord, lambda: self.client.screen(body))


def recall(client: CoordinatorClient, world: World, batch: api.BatchRecord, reason: str) -> bool:
    """Whether the coordinator audits the batch; false if it did so before, or if the batch is trained."""
    body = api.RecallBody(epoch=batch.epoch, step=batch.step, attempt=batch.attempt, reason=reason[:200])
    try:
        ask_as_one(world, api.RecallAnswer, lambda: client.recall(body))
    except RefusedError as error:
        if error.code not in ("all_audited", "batch_trained"):
            raise
        return False
    return True


def _names(batch: api.BatchRecord) -> list[str]:
    return [group.group_id for group in batch.groups]
