"""Training from recorded rollouts, without a swarm.

A directory of rollout files is read in the order of the run (step, slot, group); useful groups are dealt to steps, P at a time,
as the live run would. Recorded rewards are claims of the worker that made the file; give a `score` to compute them again.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from shoal.errors import ShoalError
from shoal.protocol.rollouts import Rollout, RolloutHeader, RolloutLimits, read_rollouts
from shoal.protocol.steps import group_name
from shoal.protocol.verdicts import is_useful
from shoal.training.packing.samples import Group, Sample
from shoal.training.reports import StepReport
from shoal.training.trainer import Trainer


class ReplayError(ShoalError):
    """Recorded rollouts that cannot be trained on."""

    code = "replay"
    permanent = True


Score = Callable[[Rollout], tuple[float, float]]
"""Task reward and reward of a recorded completion."""


def recorded_rewards(rollout: Rollout) -> tuple[float, float]:
    """As the file says: right for files of your own workers, wrong for files of strangers."""
    return rollout.task_reward, rollout.reward


def recorded_groups(directory: Path, limits: RolloutLimits, *, score: Score = recorded_rewards) -> Iterator[Group]:
    """Every group of every rollout file under the directory, in the order of the run."""
    files = list(directory.rglob("*.parquet"))
    if not files:
        raise ReplayError(f"{directory} holds no rollout files.", hint="Name a directory with *.parquet of a run.")
    headers = {file: read_rollouts(file.read_bytes(), limits)[0] for file in files}
    for file in sorted(files, key=lambda file: (headers[file].step_id, headers[file].slot, file)):
        header, rollouts = read_rollouts(file.read_bytes(), limits)
        yield from _groups(header, rollouts, score)


def useful(group: Group) -> bool:
    """Whether the task rewards differ (online filter)."""
    return is_useful(sample.task_reward for sample in group.samples)


def replay(
    trainer: Trainer,
    groups: Iterable[Group],
    *,
    steps: int,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> int:
    """Train until `steps` or the end of the recording; returns the steps trained. The last, smaller batch is trained too,
    and the last step is always checkpointed.

    A resumed trainer skips what it has seen: batches are dealt from the beginning, deterministically.
    """
    chosen = (group for group in groups if useful(group))
    trained = 0
    with trainer:
        for number in range(steps):
            batch = list(islice(chosen, trainer.config.groups_per_step))
            if not batch:
                break
            if number < trainer.step:
                continue
            on_step(trainer.train_step(batch))
            trained += 1
            if trainer.step % trainer.config.checkpoint_every == 0:
                trainer.save()
        if trained:
            trainer.save()
    return trained


def _groups(header: RolloutHeader, rollouts: Iterable[Rollout], score: Score) -> Iterator[Group]:
    by_group: dict[int, list[Sample]] = {}
    for row in rollouts:
        by_group.setdefault(row.group, []).append(_sample(header, row, score))
    for number, samples in sorted(by_group.items()):
        yield Group(group_name(header.step_id, header.slot, number), samples)


def _sample(header: RolloutHeader, row: Rollout, score: Score) -> Sample:
    task_reward, reward = score(row)
    return Sample(
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        reward=reward,
        task_reward=task_reward,
        policy_version=header.policy_version,
        truncated=row.finish_reason == "length",
    )
