"""Preference pairs from verified answers: of two completions of one task, the one that the verifier prefers is chosen.

Completions come from the answer files of `shoal eval` and `shoal curate`, or from a run: its accepted rollouts with the rewards
that the validator gave them. A task is on one side of the split only, so held-out pairs are about problems never seen in training.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shoal.coordinator.store import records
from shoal.errors import ConfigError, IntegrityError
from shoal.evaluation.answers import read_answers
from shoal.files import digest_bytes
from shoal.protocol import RolloutLimits, read_rollouts
from shoal.rundir import RunDirectory
from shoal.tasks import is_learned
from shoal.tasks.datasets.transfer import tasks_of_run

HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Candidate:
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float


@dataclass(frozen=True)
class Pair:
    """Whole sequences, prompt included."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def read_candidates(sources: Iterable[Path]) -> Iterator[Candidate]:
    """From answer files, directories of them, and run directories."""
    for source in sources:
        directory = RunDirectory(source)
        if directory.is_initialised:
            yield from from_run(directory)
            continue
        files = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
        if not files:
            raise ConfigError(
                f"{source} holds neither answers nor a run.", hint="`shoal eval` and `shoal curate` leave answers."
            )
        for file in files:
            for answer in read_answers(file):
                yield Candidate(tuple(answer.prompt_tokens), tuple(answer.output_tokens), answer.reward)


def from_run(directory: RunDirectory) -> Iterator[Candidate]:
    """Accepted rollouts; the rewards are the validator's, the bytes are those that the worker signed for.

    Tasks that a reward model scored are left out: one that learns from its own scores only reinforces them.
    """
    limits, learned = RolloutLimits.of(directory.descriptor()), _learned_tasks(directory)
    for (submission, digest), rewards in _verified_groups(directory).items():
        data = (directory.submissions / f"{submission}.parquet").read_bytes()
        if digest_bytes(data) != digest:
            raise IntegrityError(f"The rollout file of submission {submission} was changed.")
        for row in read_rollouts(data, limits)[1]:
            if row.group in rewards and row.task_id not in learned:
                yield Candidate(tuple(row.input_tokens), tuple(row.output_tokens), rewards[row.group][row.sample])


def _learned_tasks(directory: RunDirectory) -> set[str]:
    tasks = tasks_of_run(directory.descriptor(), directory.root)
    if tasks is None:
        raise ConfigError(f"The tasks of the run in {directory.root} are not in its origin any more.")
    if not any(map(is_learned, tasks.train.task_types)):
        return set()
    return {task.problem_id for task in tasks.train if is_learned(task.task_type)}


def _verified_groups(directory: RunDirectory) -> dict[tuple[str, str], dict[int, list[float]]]:
    """By submission (id, digest) and group, the task rewards of the samples."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    with records.open_store(directory) as store:
        verified = store.read(records.verified_groups)
    for group in verified:
        groups = found.setdefault((group.submission_id, group.digest), {})
        groups[group.number] = json.loads(group.task_rewards)
    return found


def is_heldout(prompt: Sequence[int]) -> bool:
    return blake3(repr(tuple(prompt)).encode()).digest()[0] % HELDOUT_ONE_IN == 0


def make_pairs(
    candidates: Iterable[Candidate], *, pairs_per_task: int = 8, seed: int = 0
) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and held-out pairs, at most `pairs_per_task` of each prompt; equal completions and equal rewards give none."""
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}
    for candidate in candidates:
        by_prompt.setdefault(candidate.prompt, {})[candidate.completion] = candidate.reward
    split: dict[bool, list[Pair]] = {False: [], True: []}
    for prompt, rewards in by_prompt.items():
        rng = random.Random(f"{seed}/{prompt}")
        split[is_heldout(prompt)] += _pairs(prompt, rewards, pairs_per_task, rng)
    return split[False], split[True]


def _pairs(prompt: tuple[int, ...], rewards: dict[tuple[int, ...], float], most: int, rng: random.Random) -> list[Pair]:
    possible = [
        Pair(prompt + better, prompt + worse)
        for better, high in rewards.items()
        for worse, low in rewards.items()
        if high > low
    ]
    return rng.sample(possible, most) if len(possible) > most else possible
