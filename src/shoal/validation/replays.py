"""Replays the episodes of a submission: every environment is asked again, and must give what the rows say it gave.

A difference in an exact environment is a proof only after two more replays, each in a fresh process that another host with another
hash seed forked, came to the same one; if they disagree, the environment is at fault, not the worker. A difference in a tolerant
one, or one that a limit of time or memory decided, leaves the group out, and many of them are an anomaly. The cost of a submission
is bounded: rows that it no longer pays for are not replayed and not used.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from os import cpu_count
from typing import Any

from shoal.protocol.rollouts import Rollout
from shoal.protocol.segments import split_segments
from shoal.protocol.verdicts import Reason
from shoal.tasks.environments.episodes import Difference, Episode, replay
from shoal.tasks.environments.host import HUNG, Called, EnvironmentHost, Session, shared_host
from shoal.tasks.rewards import TOO_LATE, ScoringBudget
from shoal.tasks.workload import Reward, WorkItem, Workload
from shoal.validation.findings import RejectedError

REPLAY_SLACK = 3.0
"""A validator grants an environment this many times the worker's processor time."""
CONFIRMING_SEEDS = ("1", "2")
"""Hash seeds of the two hosts that confirm a difference; episodes usually run with 0. A host stays: it runs nothing but the import
of its environment, and to start two for each lie would let cheaters take a validator's time."""

CONFIRMING_TRIES = 3


@dataclass(frozen=True)
class Replayed:
    rewards: dict[int, Reward]
    """By the number of the row."""
    seconds: float
    """Processor seconds of the environments."""


def replay_rows(
    rollouts: Sequence[Rollout], items: Sequence[WorkItem], workload: Workload, tolerated_share: float
) -> Replayed:
    """The rewards of all rows that are episodes; RejectedError if one is not what its environment says."""
    rows = [number for number, item in enumerate(items) if item.environment]
    budget = workload.scoring_budget(REPLAY_SLACK)

    def outcome_of(row: int) -> _Outcome:
        return _replay(rollouts[row], items[row], workload, budget)

    outcomes = dict(zip(rows, _threads().map(outcome_of, rows), strict=True))
    for row, outcome in outcomes.items():
        if outcome.is_proof:
            _confirm(row, rollouts[row], items[row], workload, outcome)
    doubtful = [row for row in rows if outcomes[row].is_doubtful]
    if len(doubtful) > max(1, tolerated_share * len(rollouts)):
        detail = f"{outcomes[doubtful[0]].sentence(doubtful[0])}, and {len(doubtful) - 1} more rows are off"
        raise RejectedError(Reason.REPLAY_TOLERANT, detail)
    return Replayed(
        {row: outcome.reward for row, outcome in outcomes.items()}, sum(one.cost_s for one in outcomes.values())
    )


@dataclass(frozen=True)
class _Outcome:
    reward: Reward
    difference: Difference | None
    is_proof: bool
    """Whether it would be one if it is confirmed."""
    cost_s: float = 0.0
    came_to: tuple[object, ...] = ()
    """Everything that the environment said."""
    is_late: bool = False
    """This machine's clock decided, which is nobody's doing."""
    is_limited: bool = False
    """A limit of time or memory ended this replay."""

    @property
    def is_doubtful(self) -> bool:
        return self.difference is not None and not self.is_late

    def sentence(self, row: int) -> str:
        assert self.difference is not None
        return f"row {row}, turn {self.difference.turn}: {self.difference.detail}"


def _replay(
    rollout: Rollout, item: WorkItem, workload: Workload, budget: ScoringBudget, host: EnvironmentHost | None = None
) -> _Outcome:
    episode = workload.episode(item, host or shared_host(item.environment), slack=REPLAY_SLACK)
    opened = episode.open_session
    episode.open_session = lambda: MeteredSession(opened(), budget)
    try:
        difference = replay(
            episode, split_segments(rollout.output_tokens, rollout.segment_lengths), rollout.finish_reason
        )
    finally:
        episode.close()
    reward = workload.episode_reward(item, episode)
    if difference is None and not episode.limited:
        difference = _other_reward(rollout, reward, episode)
    is_limited = episode.limited or rollout.finish_reason == "failed"
    is_proof = difference is not None and reward.exact and not is_limited
    if difference is not None and not is_proof:
        reward = Reward(0.0, 0.0, 0.0, f"not used: {difference.detail}", exact=False, limited=True, scored=False)
    came_to = tuple(episode.tokens), episode.finish_reason, episode.failure, episode.reward
    is_late = episode.failure in (HUNG, TOO_LATE.why)
    return _Outcome(reward, difference, is_proof, episode.cost_s, came_to, is_late, episode.limited)


class MeteredSession(Session):
    """An environment that is asked only while the submission's budget lasts."""

    def __init__(self, inner: Session, budget: ScoringBudget) -> None:
        self._inner, self._budget = inner, budget

    def reset(self, seed: int, task: Mapping[str, Any]) -> Called:
        return self._metered(lambda: self._inner.reset(seed, task))

    def step(self, action: str) -> Called:
        return self._metered(lambda: self._inner.step(action))

    def close(self) -> None:
        self._inner.close()

    def _metered(self, call: Callable[[], Called]) -> Called:
        if refusal := self._budget.refusal:
            return Called(failed=refusal.why, limited=True)
        called = call()
        self._budget.spend(called.cost_s)
        return called


def _other_reward(rollout: Rollout, reward: Reward, episode: Episode) -> Difference | None:
    if reward.agrees_with(rollout):
        return None
    return Difference(episode.turns, f"claims reward {rollout.reward:g}, it is worth {reward.total:g} ({reward.why})")


def _confirm(row: int, rollout: Rollout, item: WorkItem, workload: Workload, first: _Outcome) -> None:
    """Raises the proof, or the fault of an environment that does not repeat itself."""
    found = [_replay_again(rollout, item, workload, hash_seed) for hash_seed in CONFIRMING_SEEDS]
    if all(outcome.is_proof and outcome.came_to == first.came_to for outcome in found):
        reason = Reason.REWARD if "claims reward" in found[0].sentence(row) else Reason.REPLAY
        raise RejectedError(reason, found[0].sentence(row))
    raise RejectedError(
        Reason.ENVIRONMENT,
        f"{item.environment} came to other results in other processes: {first.sentence(row)}. Run `shoal env check`.",
    )


def _replay_again(rollout: Rollout, item: WorkItem, workload: Workload, hash_seed: str) -> _Outcome:
    """A replay that a limit cut off is repeated: on a machine that was asleep it is neither a proof nor a fault."""
    for _ in range(CONFIRMING_TRIES):
        host, budget = shared_host(item.environment, hash_seed), workload.scoring_budget(REPLAY_SLACK)
        outcome = _replay(rollout, item, workload, budget, host)
        if not outcome.is_limited:
            break
    return outcome


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2 * (cpu_count() or 1), thread_name_prefix="replays")
