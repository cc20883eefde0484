"""Warm start: a policy learns demonstrations by maximum likelihood before reinforcement learning begins.

Demonstrations are packed into bins like rollouts and train under torchrun too. Only completions carry a loss: the negative
log-likelihood summed over tokens, divided by the tokens of the optimiser step, whatever packing or world size.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from shoal.config import LoraConfig
from shoal.curation.demonstrations import Demonstration
from shoal.curation.fitting import Fit, FitReport, FitSettings
from shoal.errors import ConfigError
from shoal.policy.lora.files import read_settings
from shoal.tasks import PromptStyle, TextCodec
from shoal.training import RunFacts, Sample, World, export_policy
from shoal.training.model.adapter import Adapter
from shoal.training.model.model import load_policy
from shoal.training.packing.batch import Member, MiniBatch, build_minibatch


@dataclass(frozen=True)
class Example:
    """Prompt and completion in tokens; the completion ends with the end token."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    segment_lengths: tuple[int, ...] = ()
    """Of an episode; what its environment gave is read and not learnt."""


def encode(demonstration: Demonstration, codec: TextCodec, style: PromptStyle) -> Example:
    prompt = codec.prompt_tokens(demonstration.task, demonstration.target_length, style)
    return Example(tuple(prompt), (*codec.encode(demonstration.completion), codec.eos_token_ids[0]))


class WarmStart:
    """A policy that learns examples; `micro_batch_tokens` bounds the length of a packed bin and so activation memory."""

    def __init__(
        self,
        settings: FitSettings,
        model_dir: Path,
        *,
        work_dir: Path,
        micro_batch_tokens: int = 8192,
        start: Path | None = None,
        world: World | None = None,
    ) -> None:
        """With `start`, a PEFT directory, its adapter learns and the model stays as it is."""
        self.world = world or World.join()
        self._micro_batch_tokens = micro_batch_tokens
        self.policy = load_policy(
            model_dir,
            temperature=1.0,
            world=self.world,
            compute_dtype=self.world.compute_dtype(),
            adapter=Adapter(read_settings(start), start) if start is not None else None,
        )
        self._fit = Fit(self.policy.model, settings, work_dir, self.world)

    def train(self, examples: Sequence[Example], on_step: Callable[[FitReport], None] = lambda report: None) -> Path:
        """Learn every example; returns the checkpoint of the end. Starts again where an earlier call was interrupted."""
        if not examples:
            raise ConfigError("There is no demonstration to learn.", hint="Did the filters drop all of them?")
        plan = {"examples": _digest(examples), "bins": self._micro_batch_tokens, **asdict(self._fit.settings)}
        return self._fit.run(
            plan, len(examples), lambda chosen: self._learn([examples[index] for index in chosen]), on_step
        )

    def _learn(self, examples: Sequence[Example]) -> float:
        """Gradients of all bins; the mean negative log-likelihood per token over all ranks."""
        minibatch = self._build(examples)
        total = torch.zeros((), device=self.world.device)
        for micro_batch in minibatch.micro_batches:
            logprobs_N, _, _ = self.policy(micro_batch.bin)
            loss: Tensor = -logprobs_N.sum()
            # FSDP averages gradients over ranks, the loss is a sum over them.
            torch.autograd.backward(loss * (self.world.size / minibatch.total_weight))
            total += loss.detach()
        return float(self.world.sum(total)) / minibatch.total_weight

    def _build(self, examples: Sequence[Example]) -> MiniBatch:
        members = [Member(_sample(example), 0.0, 1.0) for example in examples]
        return build_minibatch(
            members,
            self._micro_batch_tokens,
            packed=self.policy.packed,
            rank=self.world.rank,
            ranks=self.world.size,
            device=self.world.device,
        )


def _sample(example: Example) -> Sample:
    return Sample(example.prompt, example.completion, 0.0, 0.0, segment_lengths=example.segment_lengths)


def write_policy(
    checkpoint: Path,
    model_dir: Path,
    output: Path,
    *,
    base_model: str,
    loss_curve: Sequence[tuple[int, float]],
    lora: LoraConfig | None = None,
) -> Path:
    """The warm-started policy as a plain model directory, or its adapter as a PEFT one, ready for `model.path` of a run."""
    facts = RunFacts(
        run_name="Warm start",
        base_model=base_model,
        version=0,
        method="supervised learning of demonstrations",
        loss_curve=loss_curve,
        adapter=f"rank {lora.rank}, alpha {lora.alpha:g}" if lora is not None else "",
    )
    return export_policy(checkpoint, model_dir, output, facts, lora=lora)


def _digest(examples: Sequence[Example]) -> str:
    hasher = blake3()
    for example in examples:
        hasher.update(repr(example).encode())
    return hasher.hexdigest()
