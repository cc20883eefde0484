"""A run in one process: rollouts from a policy that may lag behind the trainer, without network, roles or proofs.

What it shares with the real run is what matters for learning: engine, rewards, online filter with its cap, bf16 weights by
version, trainer. For the ablations in benchmarks/. Everything depends on the seed alone.
"""

import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal.config import ShoalConfig
from shoal.policy import Completion, GenerationRequest, TorchEngine, resolve_model
from shoal.tasks import PromptStyle, Task, TextCodec, load_tasks
from shoal.tasks.workload import Reward, rewards_of
from shoal.training.building import build_trainer
from shoal.training.packing.samples import Group, Sample
from shoal.training.replay import useful
from shoal.training.reports import StepReport

Question = tuple[Task, int]
"""A task and its target length."""
Answer = tuple[tuple[int, ...], Completion]
"""Prompt and what was sampled for it."""


class LocalRun:
    def __init__(self, config: ShoalConfig, seed: int, scratch: Path) -> None:
        """`scratch` takes the published versions; the caller removes it."""
        model_dir = resolve_model(config.model.path)
        self.config = config
        self.tasks = load_tasks(config.tasks)
        self.codec, self.style = TextCodec.from_directory(model_dir), PromptStyle.of(config.tasks)
        self.engine = TorchEngine(model_dir, eos_token_ids=self.codec.eos_token_ids, lora=config.model.adapter)
        seeded = config.run.model_copy(update={"seed": seed})
        self.trainer = build_trainer(config.model_copy(update={"run": seeded}), scratch / "trainer")
        self._random = random.Random(f"rollouts/{seed}")
        self._weights = scratch / "weights"
        self.publish()

    def publish(self) -> None:
        """Keep the current weights, or the adapter, as the swarm would get them, by version."""
        directory = self._weights / str(self.trainer.step)
        directory.mkdir(parents=True)
        tensors = {
            tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).view(tensor.shape)
            for tensor in self.trainer.wire_tensors()
        }
        save_file(tensors, directory / "model.safetensors")

    def step(self, lag: int, *, at_most: int | None = None) -> StepReport | None:
        """Generate with a version `lag` behind, train on P or `at_most` groups, publish; None if no group had a signal."""
        version = max(0, self.trainer.step - lag)
        groups = self.useful_groups(version)[:at_most]
        report = self.trainer.train_step(groups) if groups else self.trainer.skip_step()
        self.publish()
        return report if groups else None

    def useful_groups(self, version: int) -> list[Group]:
        """The first P groups with a signal, or as many as there are below the oversampling cap."""
        self.engine.load(self._weights / str(version))
        wanted = self.config.training.groups_per_step
        cap = int(self.config.training.oversampling * wanted)
        chosen: list[Group] = []
        for start in range(0, cap, wanted):
            chosen += filter(useful, self.generate(version, min(wanted, cap - start)))
            if len(chosen) >= wanted:
                break
        return chosen[:wanted]

    def generate(self, version: int, count: int) -> list[Group]:
        targets = self.config.reward.target_lengths or (0,)
        chosen = [
            (self.tasks.train[self._random.randrange(len(self.tasks.train))], self._random.choice(targets))
            for _ in range(count)
        ]
        size = self.config.rollouts.group_size
        asked = [question for question in chosen for _ in range(size)]
        answers = self._sample(asked)
        rewards = self._rewards(asked, answers)
        samples = [_as_sample(answer, reward, version) for answer, reward in zip(answers, rewards, strict=True)]
        return [Group(f"{version}/0/{number}", samples[number * size :][:size]) for number in range(count)]

    def heldout_reward(self, count: int) -> float:
        """Mean task reward of the newest version on problems that training never uses."""
        self.engine.load(self._weights / str(self.trainer.step))
        targets = self.config.reward.target_lengths or (0,)
        asked = [(self.tasks.heldout[index], targets[index % len(targets)]) for index in range(count)]
        return statistics.fmean(reward.task_reward for reward in self._rewards(asked, self._sample(asked)))

    def _sample(self, asked: Sequence[Question]) -> list[Answer]:
        rollouts = self.config.rollouts
        prompts = [tuple(self.codec.prompt_tokens(task, target, self.style)) for task, target in asked]
        requests = [
            GenerationRequest(prompt, self._random.getrandbits(64), rollouts.max_new_tokens) for prompt in prompts
        ]
        made = self.engine.generate(requests, temperature=rollouts.temperature)
        return list(zip(prompts, made, strict=True))

    def _rewards(self, asked: Sequence[Question], answers: Sequence[Answer]) -> list[Reward]:
        outputs = [(task, target, done.tokens) for (task, target), (_, done) in zip(asked, answers, strict=True)]
        return rewards_of(outputs, self.codec, self.style, self.config.reward)


def _as_sample(answer: Answer, reward: Reward, version: int) -> Sample:
    prompt, done = answer
    return Sample(
        prompt_tokens=prompt,
        output_tokens=done.tokens,
        reward=reward.total,
        task_reward=reward.task_reward,
        behaviour_logprobs=done.logprobs,  # as if every submission had been audited
        policy_version=version,
        truncated=done.finish_reason == "length",
    )
