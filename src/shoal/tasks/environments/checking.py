"""`shoal env check`: whether an environment repeats itself, and so which kind of replay a run may ask of it.

Episodes are scripts: a seed and what the policy says in each turn. Each is played in one process, then again in fresh processes
with another hash seed, in another order, slower, in another folder and locale, and interleaved with others; everything that an
environment says must be the same. Two seeds must differ, a recorded solution must earn the most, and empty or meaningless answers
the least.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.protocol.environments import EnvironmentReference
from shoal.tasks.environments.host import EnvironmentHost, Session
from shoal.tasks.environments.loading import find_environment
from shoal.tasks.environments.registry import refer

GARBAGE = ("", "?", "</think>", "<tool_call>{", "0" * 200, "\n\n\n")
PAUSE_S = 0.05
SEEDS = 16
REPEATING = {
    "semantic.replayability",
    "runtime.episode_determinism",
    "hub.cross_host_determinism",
    "semantic.verifier_determinism",
    "runtime.episode_isolation",
    "runtime.concurrent_sessions",
}
OTHER_PLACE = {"LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu"}

Said = tuple[str, bool, float, str]
"""Observation, whether it is done, reward, and how it failed."""


@dataclass(frozen=True)
class Script:
    """One episode to play."""

    seed: int
    task: Mapping[str, Any]
    actions: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    name: str
    other_name: str
    """The check of OpenEnv's RFC 008 that asks the same; empty if there is none."""
    passed: bool | None
    """None if it does not apply."""
    detail: str


@dataclass
class Checked:
    reference: EnvironmentReference
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def replay(self) -> str:
        """The class that it passed: what it declares, if every check holds."""
        return self.reference.replay if self.passed else "none"


def check_environment(
    name: str, *, task: Mapping[str, Any], actions: Sequence[str], solution: Sequence[str] = (), episodes: int = 4
) -> Checked:
    """Plays `episodes` seeds with these actions; `solution` is what earns the top reward with the first seed."""
    reference = refer(name)
    checked = Checked(reference)
    step_s = reference.limits.step_s
    scripts = [Script(seed, task, tuple(actions)) for seed in range(1, episodes + 1)]
    first = _in_process(name, "0", step_s, scripts)
    again = _in_process(name, "0", step_s, scripts)
    record = checked.checks.append
    record(_same("the same process image, again", "semantic.replayability", first, again))
    other = _in_process(name, "4711", step_s, scripts)
    record(_same("another hash seed", "runtime.episode_determinism", first, other))
    place = _in_process(name, "0", step_s, scripts, OTHER_PLACE, folder="/")
    record(_same("another folder, locale and time zone", "hub.cross_host_determinism", first, place))
    slowly = _in_process(name, "0", step_s, scripts, pause_s=PAUSE_S)
    record(_same("slower, at another time", "semantic.verifier_determinism", first, slowly))
    backwards = _in_process(name, "0", step_s, scripts[::-1])[::-1]
    record(_same("in another order", "runtime.episode_isolation", first, backwards))
    record(_same("interleaved", "runtime.concurrent_sessions", first, _interleaved(name, step_s, scripts)))
    record(_seed_matters(name, reference, scripts[0]))
    record(_never_fails(first))
    _check_rewards(checked, scripts[0], solution)
    return checked


def _in_process(
    name: str,
    hash_seed: str,
    step_s: int,
    scripts: Sequence[Script],
    variables: Mapping[str, str] | None = None,
    *,
    folder: str | None = None,
    pause_s: float = 0.0,
) -> list[list[Said]]:
    host = EnvironmentHost(name, hash_seed=hash_seed, variables=variables, folder=folder)
    try:
        return [_play(host.open(step_s), script, pause_s) for script in scripts]
    finally:
        host.close()


def _play(session: Session, script: Script, pause_s: float = 0.0) -> list[Said]:
    try:
        calls: list[Callable[[], Any]] = [lambda: session.reset(script.seed, script.task)]
        calls += [lambda action=action: session.step(action) for action in script.actions]  # type: ignore[misc]
        said: list[Said] = []
        for call in calls:
            time.sleep(pause_s)
            called = call()
            said.append((called.observation, called.done, called.reward, called.failed))
            if called.done or called.failed:
                break
        return said
    finally:
        session.close()


def _interleaved(name: str, step_s: int, scripts: Sequence[Script]) -> list[list[Said]]:
    """All episodes at once, a random one goes on each time."""
    host, rng = EnvironmentHost(name), random.Random(0)
    try:
        sessions = [host.open(step_s) for _ in scripts]
        said: list[list[Said]] = [[] for _ in scripts]
        running = list(range(len(scripts)))
        while running:
            at = rng.choice(running)
            script, turn = scripts[at], len(said[at])
            session = sessions[at]
            called = session.step(script.actions[turn - 1]) if turn else session.reset(script.seed, script.task)
            said[at].append((called.observation, called.done, called.reward, called.failed))
            if called.done or called.failed or turn == len(script.actions):
                running.remove(at)
                session.close()
        return said
    finally:
        host.close()


def _same(name: str, other_name: str, first: Sequence[list[Said]], second: Sequence[list[Said]]) -> Check:
    for episode, (one, other) in enumerate(zip(first, second, strict=True)):
        for turn in range(max(len(one), len(other))):
            before, after = one[turn : turn + 1], other[turn : turn + 1]
            if before != after:
                detail = f"episode {episode}, turn {turn}: {_shown(before)} became {_shown(after)}"
                return Check(name, other_name, False, detail)
    return Check(name, other_name, True, f"{len(first)} episodes are the same")


def _shown(said: Sequence[Said]) -> str:
    text = repr(said[0][3] or said[0][0]) if said else "nothing"
    return text if len(text) <= 60 else text[:59] + "…"


def _seed_matters(name: str, reference: EnvironmentReference, script: Script) -> Check:
    """More seeds than the other checks play: two worlds may well answer a few turns alike."""
    label = "two seeds differ", "runtime.seed_control"
    if not getattr(find_environment(name), "seeded", reference.opens):
        return Check(
            *label, None, "the environment declares seeded = False or opens = False: the task row is its world"
        )
    seeds = [Script(seed, script.task, script.actions) for seed in range(1, SEEDS + 1)]
    first, *others = _in_process(name, "0", reference.limits.step_s, seeds)
    different = any(other != first for other in others)
    return Check(*label, different, "they do" if different else f"{SEEDS} seeds gave the same episode")


def _never_fails(first: Sequence[list[Said]]) -> Check:
    failed = next((said[3] for episode in first for said in episode if said[3]), "")
    return Check("answers every turn", "runtime.step_contract", not failed, failed or "no call failed")


def _check_rewards(checked: Checked, script: Script, solution: Sequence[str]) -> None:
    name, step_s = checked.reference.name, checked.reference.limits.step_s
    bad = [Script(script.seed, script.task, (text,) * checked.reference.limits.max_turns) for text in GARBAGE]
    earned = [_total(said) for said in _in_process(name, "0", step_s, bad)]
    if not solution:
        checked.checks.append(Check("a solution earns the most", "semantic.oracle_max", None, "no solution was given"))
        top = 1.0
    else:
        (played,) = _in_process(name, "0", step_s, [Script(script.seed, script.task, tuple(solution))])
        top = _total(played)
        detail = f"it earns {top:g}, empty and meaningless answers {max(earned):g} at most"
        checked.checks.append(Check("a solution earns the most", "semantic.oracle_max", top > max(earned), detail))
    detail = f"{max(earned):g} at most"
    checked.checks.append(
        Check("empty and meaningless answers earn the least", "semantic.floor_gap", max(earned) < top, detail)
    )


def _total(said: Sequence[Said]) -> float:
    return sum(reward for _, _, reward, failed in said if not failed)


def check_lines(checked: Checked) -> list[str]:
    """The result as a person reads it."""
    marks = {True: "ok  ", False: "FAIL", None: "–   "}
    lines = [
        f"{marks[check.passed]} {check.name}{f' ({check.other_name})' if check.other_name else ''}: {check.detail}"
        for check in checked.checks
    ]
    return [*lines, _verdict(checked)]


def _verdict(checked: Checked) -> str:
    name, failed = checked.reference.name, {check.other_name for check in checked.checks if check.passed is False}
    if not failed:
        return f"{name} passed as {checked.replay}"
    if failed & REPEATING:
        return f"{name} declares {checked.reference.replay} and does not repeat itself: no run can verify it"
    return f"{name} repeats itself, but no run should train with it: see what failed above"
