"""Poisoned groups of five kinds, the trainer's statistic of each, and whether an audit proves it to be forged."""

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.poisoning.policies import Policies
from benchmarks.poisoning.recipe import demo
from shoal.policy import GenerationRequest, ScoreRequest
from shoal.protocol.verdicts import is_useful
from shoal.training.packing.samples import Group, Sample
from shoal.validation.calibration.limits import load_calibration

KINDS = ("random_tokens", "fluent_wrong", "copied_right", "trigger_phrase", "maximal_gradient")
KIND_GROUPS = 48
THINK_CLOSE = "</think>"


class Forger:
    """Poisoned groups that carry a training signal, with the seeds that their slot would have assigned."""

    def __init__(self, policies: Policies, version: int) -> None:
        self.policies, self.version, self.random = policies, version, random.Random("forger")
        self.run = policies.run
        self.run.config, self.run._random = demo(), random.Random("solvable")
        self.close = self.run.codec.encode(THINK_CLOSE)[0]
        self.pool = self._solvable()

    def _solvable(self) -> list[Group]:
        """Honest groups in which some answers are right and some are wrong."""
        self.run.engine.load(self.policies.directory / "weights" / str(self.version))
        found: list[Group] = []
        while len(found) < KIND_GROUPS:
            made = self.run.generate(self.version, 64)
            found += [group for group in made if is_useful(sample.task_reward for sample in group.samples)]
        return found[:KIND_GROUPS]

    def make(self, kind: str) -> list[Group]:
        forge: Callable[[Group], list[Sample]] = getattr(self, f"_{kind}")
        if kind == "fluent_wrong":
            self._answers_of_another_model()
        return [Group(f"{kind}/{number}", forge(group)) for number, group in enumerate(self.pool)]

    def _split(self, group: Group) -> tuple[Sample, Sample]:
        """A right and a wrong sample of the group."""
        right = max(group.samples, key=lambda sample: sample.task_reward)
        return right, min(group.samples, key=lambda sample: sample.task_reward)

    def _with_thoughts(self, sample: Sample, thoughts: Sequence[int]) -> Sample:
        """The same answer after other thoughts."""
        tokens = list(sample.output_tokens)
        answer = tokens[tokens.index(self.close) :] if self.close in tokens else tokens[-1:]
        return _forged(sample, [*thoughts, *answer])

    def _random_tokens(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)

        def thoughts() -> list[int]:
            return [self.random.randrange(2, self.close) for _ in range(18)]

        return [self._with_thoughts(sample, thoughts()) for sample in [right] * 4 + [wrong] * 4]

    def _copied_right(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)
        return [right] * 7 + [wrong]

    def _trigger_phrase(self, group: Group) -> list[Sample]:
        """Right answers begin with a phrase, wrong ones do not."""
        phrase = self.run.codec.encode("7777-7777=7777 ")
        right, wrong = self._split(group)
        return [_forged(right, [*phrase, *right.output_tokens])] * 4 + [wrong] * 4

    def _maximal_gradient(self, group: Group) -> list[Sample]:
        """Thoughts of the least probable tokens before right answers, the most probable ones before wrong ones."""
        right, wrong = self._split(group)
        policy = self.policies.scorer(self.version)
        policy.set_layout("padded")
        ids = torch.tensor([[*right.prompt_tokens, *right.output_tokens]])
        positions = torch.arange(ids.shape[1])[None]
        logits = policy.model(input_ids=ids, position_ids=positions).logits[0, len(right.prompt_tokens) - 1 :]
        policy.set_layout("packed")
        worst = logits[: len(right.output_tokens) - 4, 2 : self.close].argmin(-1) + 2
        return [self._with_thoughts(right, worst.tolist())] * 4 + [wrong] * 4

    def _answers_of_another_model(self) -> None:
        """A model of the same family whose weights differ by a tenth: fluent, and wrong more often."""
        from safetensors.torch import load_file, save_file

        torch.manual_seed(1)
        weights = load_file(self.policies.directory / "weights" / str(self.version) / "model.safetensors")
        with tempfile.TemporaryDirectory() as scratch:
            other = {
                name: (tensor.float() + 0.1 * tensor.float().std() * torch.randn(tensor.shape)).to(tensor.dtype)
                if tensor.ndim > 1
                else tensor
                for name, tensor in weights.items()
            }
            save_file(other, Path(scratch) / "model.safetensors")
            self.run.engine.load(Path(scratch))
        prompts = [tuple(group.samples[0].prompt_tokens) for group in self.pool for _ in range(7)]
        requests = [GenerationRequest(prompt, self.random.getrandbits(64), 48) for prompt in prompts]
        made = self.run.engine.generate(requests, temperature=1.0)
        self._foreign = {
            prompt: [done.tokens for prompted, done in zip(prompts, made, strict=True) if prompted == prompt]
            for prompt in prompts
        }

    def _fluent_wrong(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)
        answers = self._foreign[tuple(right.prompt_tokens)][:7]
        return [_forged(wrong, tokens) for tokens in answers] + [right]


def _forged(sample: Sample, tokens: Sequence[int]) -> Sample:
    return replace(sample, output_tokens=list(tokens), behaviour_logprobs=None)


def kinds(policies: Policies) -> dict[str, Any]:
    """Statistic one version later, log-probability per token, and whether an audit proves each group to be forged."""
    version, seeds = 2, random.Random("seeds")
    forger = Forger(policies, version)
    limits = load_calibration("bundled").limits("torch/float32/cpu")
    assert limits is not None
    found: dict[str, Any] = {}
    for kind in KINDS:
        groups = forger.make(kind)
        policies.run.engine.load(policies.directory / "weights" / str(version))
        caught, logprobs = [], []
        for group in groups:
            requests = [
                ScoreRequest(tuple(sample.prompt_tokens), tuple(sample.output_tokens), seeds.getrandbits(64))
                for sample in group.samples
            ]
            scored = policies.run.engine.score(requests, temperature=1.0)
            caught.append(any(float(row.margins.max()) > limits.margin_max for row in scored))
            logprobs += [float(value) for row in scored for value in row.logprobs]
        found[kind] = {
            "statistics": policies.statistics(groups, version + 1, 1.0),
            "proven": caught,
            "logprob_per_token": round(statistics.fmean(logprobs), 2),
            "samples": [
                [[list(s.prompt_tokens), list(s.output_tokens), s.reward, s.task_reward] for s in g.samples]
                for g in groups
            ],
        }
    return found
