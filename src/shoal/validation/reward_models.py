"""Adds the rankings of reward models to the rewards of a submission whose claims hold.

Only the validator does this. Workers neither have the models nor claim their parts, so no score of a model can be
held against them, and a run stays as verifiable as before. A task with a verifier of its own gains weight × ranking in the total;
whether its group is useful is still decided by the verifier. A task of type `reward_model:NAME` has the ranking as its reward.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from shoal.files import TOKENIZER_FILE
from shoal.policy.reward_model import RewardModel, find_reward_model
from shoal.protocol.descriptor import RunDescriptor
from shoal.tasks import TaskSet
from shoal.tasks.verifiers.reward_models import PREFIX, LearnedPart, check_named, learned_parts
from shoal.tasks.workload import Reward
from shoal.validation.checks import Checked


class RewardModelScorer:
    def __init__(self, models: Mapping[str, RewardModel], parts: Mapping[str, float]) -> None:
        """`parts` are those of the run's reward; every model that they or a task names is there."""
        self.models, self.parts = models, parts

    def amend(self, checked: Checked) -> Checked:
        """The same submission with the parts of the reward models in its rewards."""
        rewards = list(checked.rewards)
        for numbers in checked.rows_by_group().values():
            item = checked.items[numbers[0]]
            completions = [checked.rollouts[number].output_tokens for number in numbers]
            for part in learned_parts(item.task.task_type, self.parts):
                chances = self.models[part.name].rank(item.prompt_tokens, completions)
                for number, chance in zip(numbers, chances, strict=True):
                    rewards[number] = _amended(rewards[number], part, chance)
        return replace(checked, rewards=rewards)


def _amended(reward: Reward, part: LearnedPart, chance: float) -> Reward:
    gain = part.weight * chance
    return replace(
        reward,
        task_reward=reward.task_reward + (gain if part.is_task else 0.0),
        total=reward.total + gain,
        why=f"{reward.why}; {PREFIX}{part.name} gives it a chance of {chance:.2f} against its group",
        exact=reward.exact and not part.is_task,
    )


def make_scorer(models: Mapping[str, str], descriptor: RunDescriptor, tasks: TaskSet) -> RewardModelScorer | None:
    """The scorer of the run's reward models, by name and directory; refuses names that do not fit the run."""
    check_named(descriptor.reward.parts, tasks, models)
    if not models:
        return None
    loaded = {name: _load(path, descriptor) for name, path in models.items()}
    return RewardModelScorer(loaded, descriptor.reward.parts)


def _load(path: str, descriptor: RunDescriptor) -> RewardModel:
    directory = find_reward_model(path, descriptor.model_files[TOKENIZER_FILE].digest)
    return RewardModel(str(directory), device="cuda" if torch.cuda.is_available() else "cpu")
