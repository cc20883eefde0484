"""The reward model at work: adds its ranking to the rewards of a submission whose claims hold.

Only the validator does this. Workers neither have the model nor claim its part, so nothing that it says can be held against them,
and a run stays as verifiable as before. Tasks with a verifier of their own keep it and gain weight × ranking in the total; whether
their group is useful is still decided by the verifier. Tasks of type `reward_model` are judged by the ranking alone.
"""

from dataclasses import replace

from shoal.config import ValidationConfig
from shoal.errors import ConfigError
from shoal.policy.reward_model import RewardModel
from shoal.protocol.descriptor import RunDescriptor
from shoal.tasks import LEARNED, TaskSet
from shoal.tasks.workload import Reward
from shoal.validation.checks import Checked

TOKENIZER_FILE = "tokenizer.json"


class LearnedJudge:
    def __init__(self, model: RewardModel, weight: float) -> None:
        self.model, self.weight = model, weight

    def amend(self, checked: Checked) -> Checked:
        """The same submission with the reward model's part in its rewards."""
        rewards = list(checked.rewards)
        for numbers in checked.rows_by_group().values():
            chances = self.model.rank(
                checked.items[numbers[0]].prompt_tokens, [checked.rollouts[number].output_tokens for number in numbers]
            )
            for number, chance in zip(numbers, chances, strict=True):
                rewards[number] = self._amended(rewards[number], chance, checked.items[number].task.task_type)
        return replace(checked, rewards=rewards)

    def _amended(self, reward: Reward, chance: float, task_type: str) -> Reward:
        why = f"{reward.why}; the reward model gives it a chance of {chance:.2f} against its group"
        if task_type == LEARNED:
            return replace(
                reward,
                task_reward=chance,
                total=chance - reward.length_penalty,
                why=why.partition("; ")[2],
                exact=False,
            )
        return replace(reward, total=reward.total + self.weight * chance, why=why)


def make_judge(config: ValidationConfig, descriptor: RunDescriptor, tasks: TaskSet) -> LearnedJudge | None:
    """The judge that the settings name; a run whose tasks need one is not validated without."""
    if not config.reward_model:
        if LEARNED in set(tasks.table.column("task_type").unique().to_pylist()):
            raise ConfigError(
                f"Tasks of type {LEARNED} need a reward model.", hint="Name it with validation.reward_model."
            )
        return None
    model = RewardModel(config.reward_model)
    if model.tokenizer_digest != descriptor.model_files[TOKENIZER_FILE].digest:
        raise ConfigError(
            f"The reward model {config.reward_model} reads other tokens than the policy writes.",
            hint="Train it from a policy with the run's tokenizer: shoal reward-model train --model …",
        )
    return LearnedJudge(model, config.reward_model_weight)
