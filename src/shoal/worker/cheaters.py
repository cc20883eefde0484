"""Two dishonest workers for the demo, so that users can watch them being caught.

They follow the protocol in everything but the one lie that they live on; neither coordinator nor validator knows of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.policy.engine import Completion
from shoal.protocol.rollouts import Rollout
from shoal.tasks.workload import Reward, WorkItem
from shoal.worker.loop import Worker
from shoal.worker.slots import Version


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


CHEATERS: dict[str, type[Worker]] = {"stale": StaleCheater, "rewards": RewardCheater}
