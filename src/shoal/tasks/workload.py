"""From a slot seed to prompts, and from tokens to rewards: the code that worker and validator share.

Built from the run descriptor alone. A worker uses it to know what to do, a validator to know what should have been done; if the
two ever differed, honest work would be refused, so there is one implementation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.config import TASK_PART, RewardConfig
from shoal.errors import ConfigError
from shoal.protocol.assignment import assign, environment_seed
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.environments import longest_row
from shoal.protocol.rollouts import Rollout, RolloutLimits
from shoal.protocol.segments import sampled_count
from shoal.tasks.bridge import build_bridge
from shoal.tasks.codec import PromptStyle, TextCodec
from shoal.tasks.environments.episodes import Episode, Rules, episode_prompt, task_arguments
from shoal.tasks.environments.host import EnvironmentHost, shared_host
from shoal.tasks.environments.registry import environment_of
from shoal.tasks.rewards import ScoringBudget, is_costly, length_penalty, score_all
from shoal.tasks.sources import load_tasks
from shoal.tasks.task import Task, TaskSets

REWARD_TOLERANCE = 1e-9
WALL_SLACK = 2.5
"""Seconds by the clock per second of processor time, after which no further costly answer is scored."""


@dataclass(frozen=True)
class WorkItem:
    """One sample that a slot asks for."""

    group: int
    sample: int
    task: Task
    target_length: int
    prompt_tokens: tuple[int, ...]
    seed: int
    environment: str = ""
    """The one that its episode meets; empty if a verifier scores a single completion."""
    environment_seed: int = 0
    """The same for all samples of a group: they meet the same world."""


@dataclass(frozen=True)
class Reward:
    task_reward: float
    length_penalty: float
    total: float
    why: str
    exact: bool
    """A claim that differs proves cheating."""
    limited: bool = False
    """A limit of time or memory decided, so an honest claim may differ."""
    scored: bool = True
    """False if the answers before it had cost as much as a submission may."""

    def agrees_with(self, claim: Rollout) -> bool:
        return (
            abs(claim.task_reward - self.task_reward) <= REWARD_TOLERANCE
            and abs(claim.length_penalty - self.length_penalty) <= REWARD_TOLERANCE
            and abs(claim.reward - self.total) <= REWARD_TOLERANCE
        )


class Workload:
    def __init__(self, descriptor: RunDescriptor, codec: TextCodec, tasks: TaskSets) -> None:
        if tasks.train.digest != descriptor.task_set_digest:
            raise ConfigError(
                "The task set made here is not the one of the run.",
                hint="Install the release that the run's owner uses.",
            )
        self.descriptor, self.codec, self.tasks = descriptor, codec, tasks
        self.style = PromptStyle.of(descriptor.tasks)
        self._rules = {
            reference.name: Rules(
                reference,
                build_bridge(codec, self.style, reference),
                codec,
                self.style,
                descriptor.rollouts.max_new_tokens,
            )
            for reference in descriptor.environments
        }

    @classmethod
    def build(cls, descriptor: RunDescriptor, files: Mapping[str, bytes], tasks: TaskSets | None = None) -> "Workload":
        """From the tokenizer's files and the tasks that were fetched; without any, those that the source gives here."""
        return cls(descriptor, TextCodec.from_files(files), tasks or load_tasks(descriptor.tasks))

    def items(self, slot_seed: bytes) -> list[WorkItem]:
        """Every sample of a slot, group by group."""
        rollouts = self.descriptor.rollouts
        assignments = assign(
            slot_seed,
            task_count=len(self.tasks.train),
            tasks_per_slot=rollouts.tasks_per_slot,
            group_size=rollouts.group_size,
            target_lengths=self.descriptor.reward.target_lengths,
        )
        items = []
        for assignment in assignments:
            task = self.tasks.train[assignment.task_index]
            world = environment_seed(slot_seed, assignment.group)
            prompt = self.prompt_tokens(task, assignment.target_length, world)
            name = environment_of(task, self.descriptor.tasks.environment)
            items += [
                WorkItem(assignment.group, sample, task, assignment.target_length, prompt, seed, name, world)
                for sample, seed in enumerate(assignment.sampling_seeds)
            ]
        return items

    def prompt_tokens(self, task: Task, target_length: int, world: int = 0) -> tuple[int, ...]:
        """`world` is the seed of the environment that the task names, if it names one."""
        tokens = self._prompt(task, target_length, world)
        limit = self.descriptor.rollouts.max_prompt_tokens
        if len(tokens) > limit:
            # A longer one could not be submitted, and submitting it would look like cheating.
            raise ConfigError(
                f"The prompt of {task.problem_id} has {len(tokens)} tokens, the run allows {limit}.",
                hint="Only the run's owner can raise rollouts.max_prompt_tokens.",
            )
        return tuple(tokens)

    def _prompt(self, task: Task, target_length: int, world: int) -> list[int]:
        rules = self._rules.get(environment_of(task, self.descriptor.tasks.environment))
        if rules is None:
            return self.codec.prompt_tokens(task, target_length, self.style)
        return episode_prompt(rules, task, target_length, world)

    def episode(self, item: WorkItem, host: EnvironmentHost | None = None, *, slack: float = 1.0) -> Episode:
        """The episode of a sample, before its first turn; `slack` multiplies the processor time of its environment."""
        rules = self._rules[item.environment]
        step_s = math.ceil(slack * rules.reference.limits.step_s)
        chosen = host or shared_host(item.environment)
        return Episode(rules, item.environment_seed, task_arguments(item.task), lambda: chosen.open(step_s))

    def episode_reward(self, item: WorkItem, episode: Episode) -> Reward:
        """What an episode that is over is worth: what its environment gave, minus the length term over sampled tokens."""
        settings = self.descriptor.reward
        earned = episode.reward * (settings.parts.get(TASK_PART, 0.0) if settings.parts else 1.0)
        penalty = length_penalty(item.target_length, sampled_count(episode.lengths), settings.length_alpha)
        exact = episode.rules.reference.replay == "exact" and not episode.limited
        return Reward(earned, penalty, earned - penalty, episode.why, exact, episode.limited)

    def most_segments(self, environment: str) -> int:
        return longest_row((self._rules[environment].reference,)) if environment else 1

    def reward(self, task: Task, target_length: int, output_tokens: Sequence[int]) -> Reward:
        return self.rewards([(task, target_length, output_tokens)])[0]

    def is_costly(self, task: Task) -> bool:
        return is_costly(task, self.descriptor.reward.parts)

    def rewards(self, outputs: Sequence[tuple[Task, int, Sequence[int]]], *, slack: float = 1.0) -> list[Reward]:
        """What each (task, target length, output tokens) of a submission is worth; slow verifiers run side by side.

        `slack` multiplies the processor time that scoring may take.
        """
        return rewards_of(outputs, self.codec, self.style, self.descriptor.reward, self.scoring_budget(slack))

    def scoring_budget(self, slack: float = 1.0) -> ScoringBudget:
        """Of one submission."""
        seconds = self.descriptor.scoring_s
        return ScoringBudget(slack * seconds, WALL_SLACK * seconds)

    def chunk_count(self, output_tokens: int) -> int:
        return -(-output_tokens // self.descriptor.chunk_tokens)

    @property
    def limits(self) -> RolloutLimits:
        return RolloutLimits.of(self.descriptor)


def rewards_of(
    outputs: Sequence[tuple[Task, int, Sequence[int]]],
    codec: TextCodec,
    style: PromptStyle,
    settings: RewardConfig,
    budget: ScoringBudget | None = None,
) -> list[Reward]:
    """As `Workload.rewards`, without a run."""
    answers = [(task, codec.answer_text(tokens, style)) for task, _, tokens in outputs]
    scores = score_all(answers, settings.parts, budget)
    penalties = [length_penalty(target, len(tokens), settings.length_alpha) for _, target, tokens in outputs]
    return [
        Reward(found.reward, penalty, found.reward - penalty, found.why, found.exact, found.limited, found.scored)
        for found, penalty in zip(scores, penalties, strict=True)
    ]
