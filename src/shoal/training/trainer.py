"""The training engine: groups in, the next policy version out.

`train_step` computes the old log-probabilities of the whole batch and the first gradient, lets a caller settle from one statistic
per group which groups are trained, then takes one optimiser step per mini-batch. The loss is
summed over tokens and divided by the mini-batch's global token weight. Given the same groups, seed and thread count the
weights are bit-identical, across kills and resumes; after an error the object must not be used again.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from shoal.broadcast import WireTensor
from shoal.config import LoraConfig, TrainingConfig
from shoal.errors import ConfigError, ShoalError
from shoal.policy.weights import WireCopy, unique_tensors
from shoal.protocol.steps import Rewind
from shoal.rundir import checkpoints_of
from shoal.training.checkpoints import Checkpoints, always
from shoal.training.model.adapter import Adapter
from shoal.training.model.determinism import fingerprint
from shoal.training.model.distributed import World, clip_gradients
from shoal.training.model.dithering import dither_masters
from shoal.training.model.model import PolicyModel, attention_cost, load_policy
from shoal.training.model.reference import Reference
from shoal.training.objective.advantages import ADVANTAGES
from shoal.training.objective.corrections import CORRECTIONS
from shoal.training.objective.losses import LOSSES, TokenBatch, TokenLoss, k3_divergence, penalised
from shoal.training.objective.registry import find_function
from shoal.training.objective.schedules import check_schedule, learning_rate
from shoal.training.packing.batch import Member, MicroBatch, MiniBatch, build_minibatch, choose_members, split_groups
from shoal.training.packing.samples import Group, check_groups
from shoal.training.reports import StepReport, TokenSums, group_metrics, token_metrics, token_statistics
from shoal.training.screening import GroupScores
from shoal.training.snapshots import Snapshot

NORM_FACTOR = 10.0
"""A first gradient this many times the usual one is not trained on before every group of its batch is audited."""
NORMS_KEPT, NORMS_NEEDED = 32, 8
BETAS = (0.9, 0.99)
"""AdamW moments; 0.99 follows the drifting objective faster than 0.999."""
CORRECTION_CAP = 5.0
"""Cap of the lag correction; 2 to 5 are usual."""


class DivergedError(ShoalError):
    """Training left the region in which its numbers mean anything; the last checkpoint is good."""

    code = "diverged"
    permanent = True


Settle = Callable[[Sequence[float]], Sequence[Group] | None]


@dataclass(frozen=True)
class _Prepared:
    """A batch before its first update."""

    groups: Sequence[Group]
    advantages: list[list[float]]
    minibatches: list[MiniBatch]
    sums: TokenSums
    scores: GroupScores


class Trainer:
    """Owns the fp32 weights or factors, the optimiser and their checkpoints.

    Leaving its context waits until the last checkpoint is on disk, also when an exception ends the training.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model_dir: Path,
        *,
        work_dir: Path,
        temperature: float,
        seed: int,
        max_new_tokens: int = 0,
        lora: LoraConfig | None = None,
        start: Path | None = None,
        longest_row: int = 0,
        steps: int = 0,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """With `lora` an adapter is trained beside the frozen model, from the PEFT directory `start` if there is one."""
        if config.overlong == "penalise" and not max_new_tokens:
            raise ConfigError("training.overlong = 'penalise' needs the completion limit.")
        check_schedule(config, steps)
        self.config = config
        self.world = world or World.join(config.device)
        self.step = 0
        """Next step to train, and the version of the current weights."""
        self.epoch = 0
        """Of the run; a checkpoint says in which one it was made."""
        self.updates = 0
        """Optimiser steps taken."""
        self._norms: list[float] = []
        """Of the first gradients of the last steps."""
        self._seed = seed
        self._max_new_tokens, self.longest_row, self._steps = max_new_tokens, longest_row, steps
        self._clock = clock
        self._advantage = find_function("advantage", config.advantage, ADVANTAGES)
        self._loss = find_function("loss", config.loss, LOSSES)
        self._correction = find_function("correction", config.correction, CORRECTIONS)
        self._adapter = Adapter(lora, start, seed) if lora is not None else None
        self.policy = self._load(model_dir, temperature, trained=True)
        self._attention = attention_cost(self.policy.model)
        if config.dither_masters and self._adapter is None:  # factors are published as they are
            dither_masters(unique_tensors(self.policy.model).items(), seed)
        copied = bool(config.kl_beta) and lora is None
        self._reference = Reference(self.policy, self._load(model_dir, temperature, trained=False) if copied else None)
        self._optimiser = torch.optim.AdamW(
            [parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._wire_copy = WireCopy(self.policy.model)
        self._snapshot: Snapshot | None = None
        """Of the current weights; they change only after it was secured."""
        self._checkpoints = Checkpoints(checkpoints_of(work_dir), self.world, keep=config.keep_checkpoints)

    def train_step(self, groups: Sequence[Group], settle: Settle | None = None) -> StepReport:
        """Train on one batch; every rank passes the same groups.

        `settle` is given the statistic of each group before the first update. It returns other groups to train on instead, or
        None for these.
        """
        started = self._clock()
        first = self._prepare(groups)
        while settle is not None and (others := settle(first.scores.statistics(self.world))) is not None:
            if not others:
                return self.skip_step()
            first = self._prepare(others)
        self._check_lag("kl_behaviour", first.scores.lag(self.world))
        recomputed = self._clock()
        norms = [self._update(first, number) for number in range(self.config.epochs * len(first.minibatches))]
        report = StepReport(
            **group_metrics(self.step, first.groups, first.advantages),
            **self._update_metrics(first.sums.reduce(self.world), norms),
            **_times(started, recomputed, self._clock()),
        )
        report.tokens_per_s = report.trained_tokens / report.step_s if report.step_s else 0.0
        self._check_divergence(report)
        self._norms = [*self._norms, *norms[:1]][-NORMS_KEPT:]
        self.step += 1
        return report

    def gradient_fingerprint(self, groups: Sequence[Group]) -> list[int]:
        """Of this rank's part of the first gradient of a batch that is not trained on."""
        self._prepare(groups)
        found = fingerprint(parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None)
        self._optimiser.zero_grad()
        return found

    def skip_step(self) -> StepReport:
        """A step without anything to train on: the weights stay as they are, under the next number."""
        self._optimiser.zero_grad()
        self.step += 1
        return StepReport(self.step - 1, self.step)

    def save(self, confirm: Callable[[], bool] = always) -> Path:
        """Start writing a checkpoint of the current step; the directory appears when it is whole and `confirm` says yes."""
        facts = {"epoch": self.epoch, "updates": self.updates, "norms": self._norms}
        return self._checkpoints.save(self.step, self.policy.model, self._optimiser, facts, confirm)

    def checkpoint_steps(self) -> list[int]:
        """Steps that can be resumed, oldest first."""
        return self._checkpoints.steps()

    def drop_void(self, rewinds: Sequence[Rewind]) -> list[int]:
        """Remove checkpoints that a rewind voided, on every disk; all ranks call it before they resume."""
        return self._checkpoints.drop_void(rewinds)

    def resume(self) -> bool:
        """Continue from the newest checkpoint, the same on all ranks; False if there is none, and training starts at step 0."""
        self._checkpoints.finish()
        step = self._checkpoints.choose()
        if step is None:
            return False
        self._secure_snapshot()
        facts = self._checkpoints.load(step, self.policy.model, self._optimiser)
        self.step, self.updates, self._norms = step, int(facts["updates"]), list(facts["norms"])
        self._optimiser.zero_grad()
        return True

    def close(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self._checkpoints.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpoints.__exit__(kind, error, trace)

    def snapshot(self) -> Snapshot:
        """A bf16 copy of the current weights in host memory, made later if they are whole; the one before must not be in use.

        Sharded weights are gathered now, tensor by tensor: every rank must call this, and gets nothing but on the main rank.
        """
        self._snapshot = Snapshot(lambda: self._wire_copy.take(here=self.world.is_main))
        if self.world.size > 1:
            self._snapshot.tensors()
        return self._snapshot

    def wire_tensors(self) -> Sequence[WireTensor]:
        """The copy, made now; the next one overwrites it."""
        return self.snapshot().tensors()

    def _secure_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.secure()
            self._snapshot = None

    def _load(self, model_dir: Path, temperature: float, *, trained: bool) -> PolicyModel:
        return load_policy(
            model_dir,
            temperature=temperature,
            world=self.world,
            compute_dtype=self.world.compute_dtype(self.config.compute_dtype),
            trained=trained,
            adapter=self._adapter if trained else None,
            activation_checkpointing=trained and self.config.activation_checkpointing,
            longest_row=self.longest_row,
        )

    def _build(self, members: Sequence[Member]) -> MiniBatch:
        return build_minibatch(
            members,
            1 if self.policy.one_by_one else self.config.micro_batch_tokens,
            packed=self.policy.packed,
            attention=self._attention,
            rank=self.world.rank,
            ranks=self.world.size,
            device=self.world.device,
        )

    def _prepare(self, groups: Sequence[Group]) -> _Prepared:
        """All that comes before the first update, its gradient included: nothing is computed twice, and nothing has changed."""
        check_groups(groups)
        self._optimiser.zero_grad()
        # What a user's own function samples depends on seed and step only, so no random state has to be saved.
        torch.manual_seed(random.Random(f"{self._seed}/{self.step}").getrandbits(63))
        members = choose_members(groups, self._advantage, self.config, self._max_new_tokens)
        parts = split_groups(members, self.config.minibatches, self._seed, self.step)
        device = self.world.device
        first = _Prepared(
            groups,
            [[member.advantage for member in group] for group in members],
            [self._build(part) for part in parts],
            TokenSums(device),
            GroupScores(len(groups), device),
        )
        self._recompute_logprobs(first)
        if first.minibatches:
            self._backward(first.minibatches[0], first.sums, first.scores)
        return first

    @torch.no_grad()
    def _recompute_logprobs(self, first: _Prepared) -> None:
        """Old and reference log-probabilities of the whole batch, before the first update.

        The first mini-batch is left out: its own forward pass runs on the same weights and the same bins, bit for bit.
        """
        for number, minibatch in enumerate(first.minibatches):
            for micro_batch in minibatch.micro_batches:
                if number > 0:
                    micro_batch.old_N, *spread = self.policy(micro_batch.bin)
                    first.scores.add(micro_batch, micro_batch.old_N, *spread)
                if self.config.kl_beta:
                    micro_batch.reference_N = self._reference(micro_batch.bin)

    def _backward(self, minibatch: MiniBatch, sums: TokenSums, scores: GroupScores | None = None) -> None:
        for micro_batch in minibatch.micro_batches:
            # FSDP averages gradients over ranks, the loss is a sum over them.
            loss = self._loss_of(micro_batch, sums, scores) * (self.world.size / minibatch.total_weight)
            torch.autograd.backward(loss)

    def _update(self, first: _Prepared, number: int) -> float:
        """One optimiser step; returns the gradient norm before clipping. The first gradient is there already."""
        if number:
            self._backward(first.minibatches[number % len(first.minibatches)], first.sums)
        norm = clip_gradients(self.policy.parameters(), self.config.max_grad_norm)
        if not math.isfinite(norm):
            raise DivergedError(
                f"The gradient of step {self.step} is not finite.",
                hint="Resume from the last checkpoint with a lower learning rate or a tighter clip.",
            )
        if not number:
            self._check_norm(norm, first.groups)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(self.config, self.updates, self._steps)
        self._secure_snapshot()
        self._optimiser.step()
        self._optimiser.zero_grad()
        self.updates += 1
        return norm

    def _loss_of(self, micro_batch: MicroBatch, sums: TokenSums, scores: GroupScores | None) -> Tensor:
        """Weighted sum over the tokens of one bin; adds what is reported about them to `sums` and `scores`."""
        logprobs_N, entropies_N, variances_N = self.policy(micro_batch.bin)
        if scores is not None:
            scores.add(micro_batch, logprobs_N, entropies_N, variances_N)
        if micro_batch.old_N is None:
            micro_batch.old_N = logprobs_N.detach()
        tokens = TokenBatch(
            logprobs_N, micro_batch.old_N, self._advantages(micro_batch), micro_batch.bin.row_N, micro_batch.bin.rows
        )
        policy_loss = self._loss(tokens, self.config)
        terms = self._loss_terms(micro_batch, tokens, policy_loss)
        loss_N = terms["policy_loss"]
        if "kl_reference" in terms and self.config.kl_form == "loss":
            loss_N = loss_N + self.config.kl_beta * terms["kl_reference"]
        if self.config.entropy_eta:
            loss_N = loss_N - self.config.entropy_eta * entropies_N
        sums.add(
            loss=loss_N.detach(),
            **{name: term_N.detach() for name, term_N in terms.items()},
            **token_statistics(tokens, entropies_N, micro_batch.behaviour_N, policy_loss),
        )
        return (loss_N * micro_batch.weights_N).sum()

    def _advantages(self, micro_batch: MicroBatch) -> Tensor:
        if self.config.kl_form == "loss" or micro_batch.reference_N is None or micro_batch.old_N is None:
            return micro_batch.advantages_N
        return penalised(micro_batch.advantages_N, micro_batch.old_N, micro_batch.reference_N, self.config.kl_beta)

    def _loss_terms(self, micro_batch: MicroBatch, tokens: TokenBatch, policy_loss: TokenLoss) -> dict[str, Tensor]:
        """Per token: the corrected policy loss, its correction, and the divergence from the reference if there is one."""
        correction_N = self._correction_weights(micro_batch, tokens.old_logprobs_N)
        terms = {"policy_loss": policy_loss.loss_N * correction_N, "correction": correction_N}
        if micro_batch.reference_N is not None:
            terms["kl_reference"] = k3_divergence(tokens.logprobs_N, micro_batch.reference_N)
        return terms

    def _correction_weights(self, micro_batch: MicroBatch, old_N: Tensor) -> Tensor:
        known = ~micro_batch.behaviour_N.isnan()
        log_ratio_N = torch.where(known, old_N - micro_batch.behaviour_N, 0.0)
        bin = micro_batch.bin
        weights_N = self._correction(log_ratio_N, bin.row_N, bin.rows, CORRECTION_CAP)
        return torch.where(known, weights_N, 1.0)

    def _update_metrics(self, totals: dict[str, float], norms: Sequence[float]) -> dict[str, Any]:
        count = max(1, len(norms))
        return token_metrics(totals) | {
            "trained_tokens": round(totals["tokens"] / self.config.epochs),
            "optimiser_steps": len(norms),
            "grad_norm_mean": sum(norms) / count,
            "grad_norm_max": max(norms, default=0.0),
            "grad_clip_fraction": sum(norm > self.config.max_grad_norm for norm in norms) / count,
            "learning_rate": learning_rate(self.config, max(0, self.updates - 1), self._steps),
        }

    def _check_divergence(self, report: StepReport) -> None:
        for name in ("kl_update", "kl_behaviour"):
            self._check_lag(name, getattr(report, name))

    def _check_norm(self, norm: float, groups: Sequence[Group]) -> None:
        """Before anything has changed. A batch of audited groups is trained whatever its gradient: it is clipped anyway."""
        usual = statistics.median(self._norms) if len(self._norms) >= NORMS_NEEDED else math.inf
        audited = all(sample.behaviour_logprobs is not None for group in groups for sample in group.samples)
        if norm > NORM_FACTOR * usual and not audited:
            raise DivergedError(
                f"The first gradient of step {self.step} has norm {norm:.3g}, usual is {usual:.3g}.",
                hint="Every group of the batch was audited or should be: look at the rollouts of this step.",
            )

    def _check_lag(self, name: str, value: float | None) -> None:
        if value is None:
            return  # nothing was audited; the report leaves it out, and the service says so
        if not math.isfinite(value) or value > self.config.kl_limit:
            raise DivergedError(
                f"{name} of step {self.step} is {value:.3g}, above the limit {self.config.kl_limit:g}.",
                hint="Resume from the last checkpoint with a lower learning rate, or raise training.kl_limit.",
            )


def _times(started: float, recomputed: float, finished: float) -> dict[str, Any]:
    return {
        "old_logprobs_s": recomputed - started,
        "update_s": finished - recomputed,
        "step_s": finished - started,
    }
