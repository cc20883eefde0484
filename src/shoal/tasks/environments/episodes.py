"""One episode: a pure function of task, environment seed and sampled segments, stepped by the worker and replayed by the validator.

`take` hands over one sampled segment: decode, parse, step, bridge. Afterwards the episode is over, for one of five reasons, or has
grown by the tokens that the environment gave and waits for the next segment. The observation after the end is not appended. A turn
without an end token ends the episode, and so does a failure of the environment, which earns nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.protocol.environments import EnvironmentReference
from shoal.tasks.bridge import Bridge
from shoal.tasks.codec import PromptStyle, TextCodec
from shoal.tasks.environments.host import Called, Session, shared_host
from shoal.tasks.task import Task

Finish = Literal["done", "length", "turns", "context", "failed"]


@dataclass(frozen=True)
class Rules:
    """What the episodes of one environment of a run follow."""

    reference: EnvironmentReference
    bridge: Bridge
    codec: TextCodec
    style: PromptStyle
    max_tokens: int
    """Of the completion: sampled and given tokens together."""


def task_arguments(task: Task) -> dict[str, Any]:
    """What `reset` gets of a task beside the seed."""
    return {"prompt": task.prompt, "metadata": task.metadata, **task.verification_info}


def episode_prompt(rules: Rules, task: Task, target_length: int, seed: int) -> list[int]:
    """The prompt of a task, with what its environment says first if it says anything."""
    tools, style = rules.reference.tools, rules.style
    if not rules.reference.opens:
        return rules.codec.prompt_tokens(task, target_length, style, tools)
    session = shared_host(rules.reference.name).open(rules.reference.limits.step_s)
    try:
        said = session.reset(seed, task_arguments(task)).observation  # empty if it failed: then its episodes fail too
    finally:
        session.close()
    if not said:
        return rules.codec.prompt_tokens(task, target_length, style, tools)
    opening = rules.codec.plain_tokens(said)[: rules.reference.limits.observation_tokens]
    return rules.codec.opened_prompt_tokens(task, target_length, style, tools, opening)


@dataclass
class Episode:
    rules: Rules
    seed: int
    task: Mapping[str, Any]
    open_session: Callable[[], Session]
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Of the segments so far."""
    reward: float = 0.0
    finish_reason: Finish | Literal[""] = ""
    failure: str = ""
    limited: bool = False
    cost_s: float = 0.0
    _session: Session | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason)

    @property
    def turns(self) -> int:
        return (len(self.lengths) + 1) // 2

    @property
    def turn_limit(self) -> int:
        """Tokens that the next turn may have."""
        return min(self.rules.reference.limits.turn_tokens, self.rules.max_tokens - len(self.tokens))

    @property
    def why(self) -> str:
        name, turns = self.rules.reference.name, f"turn {self.turns}"
        if self.failure:
            return f"{name} {self.failure} in {turns}"
        return f"{name} gave {self.reward:g} and ended with {self.finish_reason!r} in {turns}"

    def take(self, sampled: Sequence[int]) -> None:
        """Hands over a segment that is within `turn_limit`; may wait for the environment."""
        assert not self.is_over
        assert 1 <= len(sampled) <= self.turn_limit
        self._append(sampled)
        if sampled[-1] not in self.rules.codec.eos_token_ids:
            self._end("length")
            return
        called = self._step(self.rules.codec.answer_text(sampled, self.rules.style))
        if called.failed:
            self.fail(called.failed)
            self.limited = called.limited
            return
        self.reward += called.reward
        self._go_on(called)

    def _go_on(self, called: Called) -> None:
        if called.done:
            self._end("done")
        elif self.turns >= self.rules.reference.limits.max_turns:
            self._end("turns")
        else:
            given = self.rules.bridge.given(called.observation)
            if len(self.tokens) + len(given) >= self.rules.max_tokens:
                self._end("context")
            else:
                self._append(given)

    def fail(self, how: str) -> None:
        """Ends it because its environment cannot be asked here."""
        self.failure, self.limited, self.reward = how, True, 0.0
        self._end("failed")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _step(self, action: str) -> Called:
        if self._session is None:
            self._session = self.open_session()
            begun = self._session.reset(self.seed, self.task)
            self.cost_s += begun.cost_s
            if begun.failed:
                return begun
        called = self._session.step(action)
        self.cost_s += called.cost_s
        return called

    def _append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.lengths.append(len(tokens))

    def _end(self, reason: Finish) -> None:
        self.finish_reason = reason
        self.close()


@dataclass(frozen=True)
class Difference:
    """Where a replay came to something else than the row says."""

    turn: int
    detail: str


def replay(episode: Episode, segments: Sequence[Sequence[int]], finish_reason: str) -> Difference | None:
    """Repeats an episode from its sampled segments; None if the environment gave what the row says and ended it so."""
    for number, segment in enumerate(segments[::2]):
        turn, given = number + 1, list(segments[2 * number + 1]) if 2 * number + 1 < len(segments) else None
        if complaint := _misfit(episode, segment, is_last=given is None):
            return Difference(turn, complaint)
        before = len(episode.tokens) + len(segment)
        episode.take(segment)
        if given is None:
            break
        if episode.is_over:
            return Difference(turn, f"goes on after the episode ended with {episode.finish_reason!r}")
        if episode.tokens[before:] != given:
            return Difference(turn, "shows an observation that the environment did not give")
    if episode.finish_reason != finish_reason:
        reached = repr(episode.finish_reason) if episode.is_over else "another turn"
        return Difference(episode.turns, f"ends with {finish_reason!r}, the environment comes to {reached}")
    return None


def _misfit(episode: Episode, segment: Sequence[int], *, is_last: bool) -> str:
    """Why no honest turn is like this; empty if one may be."""
    ends = episode.rules.codec.eos_token_ids
    if len(segment) > episode.turn_limit:
        return f"has {len(segment)} tokens, {episode.turn_limit} are allowed"
    if any(token in ends for token in segment[:-1]):
        return "goes on after an end token"
    if segment[-1] not in ends and (not is_last or len(segment) < episode.turn_limit):
        return f"stops after {len(segment)} tokens without an end token"
    return ""
