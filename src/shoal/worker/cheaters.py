"""Dishonest workers for the demos, two each, so that users can watch them being caught.

They follow the protocol in everything but the one lie that they live on; neither coordinator nor validator knows of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.policy.engine import Completion
from shoal.proofs.commitments import CHUNK_TOKENS
from shoal.protocol.rollouts import Rollout
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.environments.host import Called, Session
from shoal.tasks.workload import Reward, WorkItem
from shoal.worker.loop import Worker
from shoal.worker.slots import Slot, Version


class StaleCheater(Worker):
    """Saves the download: keeps the first weights it ever got, and shows old proofs for new text."""

    _first_path: Path | None = None
    _old_proofs: Sequence[bytes] = ()

    def policy_path(self, version: Version, *, deadline_s: float) -> Path:
        path = super().policy_path(version, deadline_s=deadline_s)
        self._first_path = self._first_path or path
        return self._first_path

    def rollout(self, item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
        honest = super().rollout(item, completion, reward)
        self._old_proofs = self._old_proofs or honest.proofs
        forged = [self._old_proofs[index % len(self._old_proofs)] for index in range(len(honest.proofs))]
        return replace(honest, proofs=forged)


class RewardCheater(Worker):
    """Saves the thinking: claims that every answer is right."""

    def rollout(self, item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
        honest = super().rollout(item, completion, reward)
        return replace(honest, task_reward=1.0, reward=1.0 - honest.length_penalty)


class ForgedToolCheater(Worker):
    """Saves the tool: makes its results up."""

    def _episode(self, slot: Slot, at: int) -> Episode | None:
        episode = super()._episode(slot, at)
        if episode is not None:
            honest = episode.open_session
            episode.open_session = lambda: ForgedSession(honest())
        return episode


class ForgedSession(Session):
    """An environment whose observations all say the same."""

    def __init__(self, honest: Session) -> None:
        self._honest = honest

    def reset(self, seed: int, task: Mapping[str, Any]) -> Called:
        return self._honest.reset(seed, task)

    def step(self, action: str) -> Called:
        called = self._honest.step(action)
        return called if called.done else replace(called, observation="42")

    def close(self) -> None:
        self._honest.close()


class HiddenTurnCheater(Worker):
    """Hides what went wrong: shows the last turn as if it had been the only one."""

    def rollout(self, item: WorkItem, completion: Completion, reward: Reward) -> Rollout:
        honest = super().rollout(item, completion, reward)
        last = honest.segment_lengths[-1]
        if len(honest.segment_lengths) == 1:
            return honest
        return replace(
            honest,
            output_tokens=honest.output_tokens[-last:],
            segment_lengths=[last],
            output_logprobs=honest.output_logprobs[-last:],
            proofs=honest.proofs[: math.ceil(last / CHUNK_TOKENS)],
        )


CHEATERS: dict[str, type[Worker]] = {
    "stale": StaleCheater,
    "rewards": RewardCheater,
    "forged-tool": ForgedToolCheater,
    "hidden-turn": HiddenTurnCheater,
}
