"""Episodes of honest workers and of cheats, against the replay and the audit of a validator.

A cheat takes an honest submission and tells one lie in it, with the true policy's log-probabilities and commitments for what it
then claims. It returns None where the submission has nothing to lie about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.policy.engine import Engine, GenerationRequest, ScoreRequest
from shoal.policy.episodes import play_all
from shoal.proofs import build_proofs, split_chunks
from shoal.protocol.rollouts import Rollout
from shoal.protocol.segments import split_segments
from shoal.protocol.verdicts import Reason
from shoal.tasks.workload import WorkItem
from shoal.validation import RejectedError, audit, check_claims, load_calibration
from shoal.worker.submission import as_rollout
from support.submissions import Submission, header_for
from support.tiny_run import TinyRun, make_lease, make_tiny_run

ENVIRONMENT = "adversaries.world:World"
VOCABULARY = 320
Segments = list[list[int]]


@dataclass
class EpisodeArena:
    run: TinyRun
    _honest: dict[int, Submission] = field(default_factory=dict)

    def items(self, slot: int) -> list[WorkItem]:
        return self.run.workload.items(bytes.fromhex(make_lease(slot).slot_seed))

    def honest(self, slot: int, engine: Engine | None = None, *, seed_shift: int = 0) -> Submission:
        """What a worker uploads; with a shift, one whose environment has another seed."""
        workload, items = self.run.workload, self.items(slot)
        limit = workload.descriptor.rollouts.max_new_tokens
        requests = [GenerationRequest(item.prompt_tokens, item.seed, limit) for item in items]
        episodes = [workload.episode(item) for item in items]
        for episode in episodes:
            episode.seed += seed_shift
        used = engine or self.run.engine()
        made = play_all(used, requests, episodes, temperature=1.0)
        rows = [
            as_rollout(item, completion, workload.episode_reward(item, episode))
            for item, completion, episode in zip(items, made, episodes, strict=True)
        ]
        lease = make_lease(slot)
        header = header_for(lease).model_copy(update={"numerics_class": used.numerics_class})
        return Submission(lease, header, rows)

    def known_honest(self, slot: int) -> Submission:
        """The same for every cheat."""
        if slot not in self._honest:
            self._honest[slot] = self.honest(slot)
        return self._honest[slot]

    def with_segments(self, sent: Submission, row: int, segments: Segments, **fields: Any) -> Submission:
        """A row of other segments, with the true policy's claims about them."""
        item = self.items(sent.lease.slot)[row]
        tokens, lengths = [token for part in segments for token in part], [len(part) for part in segments]
        request = ScoreRequest(item.prompt_tokens, tuple(tokens), item.seed, tuple(lengths))
        (scored,) = self.run.engine().score([request], temperature=1.0)
        claims: dict[str, Any] = {
            "output_tokens": tokens,
            "segment_lengths": lengths,
            "output_logprobs": scored.logprobs.tolist(),
            "proofs": build_proofs(split_chunks(scored.states)),
        }
        return sent.changed(row, lambda rollout: replace(rollout, **claims, **fields))

    def verify(self, sent: Submission, *, audited: bool = True) -> tuple[Reason, ...]:
        """Every check of a full audit."""
        try:
            checked = check_claims(sent.data, sent.claim(), self.run.workload, VOCABULARY)
        except RejectedError as rejected:
            return (rejected.finding.reason,)
        limits = load_calibration("bundled").limits(sent.header.numerics_class)
        assert limits is not None
        if not audited:
            return ()
        findings, _ = audit(checked, self.run.engine(), limits, 1.0, checked.rows_by_group())
        return tuple(finding.reason for finding in findings)


def make_episode_arena(root: Path, **options: Any) -> EpisodeArena:
    return EpisodeArena(make_tiny_run(root, environment=ENVIRONMENT, **options))


def parts(row: Rollout) -> Segments:
    return [list(part) for part in split_segments(row.output_tokens, row.segment_lengths)]


def longest(sent: Submission, fewest: int = 3) -> int | None:
    """The row with the most turns, if it has at least `fewest` segments."""
    row = max(range(len(sent.rollouts)), key=lambda number: len(sent.rollouts[number].segment_lengths))
    return row if len(sent.rollouts[row].segment_lengths) >= fewest else None


Cheat = Callable[[EpisodeArena, Submission], Submission | None]


def in_segments(change: Callable[[Segments], Segments | None], fewest: int = 3, **fields: Any) -> Cheat:
    def cheat(arena: EpisodeArena, sent: Submission) -> Submission | None:
        row = longest(sent, fewest)
        changed = change(parts(sent.rollouts[row])) if row is not None else None
        return arena.with_segments(sent, row, changed, **fields) if row is not None and changed else None

    return cheat


def _forged(segments: Segments) -> Segments:
    first, given, *rest = segments
    digit = next(at for at, token in enumerate(given) if 20 <= token <= 29)
    return [first, [*given[:digit], 20 + (given[digit] - 19) % 10, *given[digit + 1 :]], *rest]


def _action_changed(segments: Segments) -> Segments | None:
    first, *rest = segments
    return [[71 if first[0] != 71 else 72, *first[1:]], *rest] if len(first) > 1 else None


def _smuggled(segments: Segments) -> Segments:
    first, given, *rest = segments
    return [first, [*given[:-3], 1, 4, 318, *given[-3:]], *rest]


def _moved_boundary(segments: Segments) -> Segments:
    """The first token of an observation counts as sampled."""
    first, given, *rest = segments
    return [[*first, given[0]], given[1:], *rest]


def _one_segment(segments: Segments) -> Segments:
    """What the environment gave is to be trained on too."""
    return [[token for part in segments for token in part]]


def _other_seed(arena: EpisodeArena, sent: Submission) -> Submission | None:
    other = arena.honest(sent.lease.slot, seed_shift=1)
    return other if longest(other) is not None else None


def _reward_of_another(arena: EpisodeArena, sent: Submission) -> Submission | None:
    best = max(sent.rollouts, key=lambda row: row.task_reward)
    row = next((at for at, one in enumerate(sent.rollouts) if one.task_reward != best.task_reward), None)
    if row is None:
        return None
    return sent.changed(
        row, lambda one: replace(one, task_reward=best.task_reward, reward=best.task_reward - one.length_penalty)
    )


EPISODE_CHEATS: dict[str, Cheat] = {
    "forged_observation": in_segments(_forged),
    "skipped_turn": in_segments(lambda segments: segments[2:]),
    "hidden_middle_turn": in_segments(lambda segments: [segments[0], *segments[3:]], fewest=5),
    "on_after_done": in_segments(lambda segments: [*segments, segments[1], segments[0]], fewest=5),
    "stops_early": in_segments(lambda segments: segments[:-2]),
    "other_environment_seed": _other_seed,
    "action_changed": in_segments(_action_changed),
    "reward_of_another": _reward_of_another,
    "smuggled_control_tokens": in_segments(_smuggled),
    "moved_boundary": in_segments(_moved_boundary),
    "one_segment": in_segments(_one_segment),
}


def caught(arena: EpisodeArena, name: str, slots: Sequence[int]) -> list[tuple[Reason, ...]]:
    """What the checks say of a cheat in these slots, where it has something to lie about."""
    found = []
    for slot in slots:
        lie = EPISODE_CHEATS[name](arena, arena.known_honest(slot))
        if lie is not None:
            found.append(arena.verify(lie))
    return found
