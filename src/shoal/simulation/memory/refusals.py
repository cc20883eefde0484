"""Refusals that hold for everybody: idle keys of a large swarm hear little else, so such an answer is decided once.

`rules.leases` is asked about the best-placed key of a kind: without failures, slots of the step or a late slot. If even that key is
refused, so is every other one of its kind with the same versions, for the same reason. Kinds differ in what the limits of a step
follow from. An answer is repeated as long as what the rule looks at for such a key stays the same, which outlasts most changes of
a tally (`tests/simulation/test_refusals.py` holds the rule to all of this).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator.rules import leases

KEPT = 1 << 13


class Kind(NamedTuple):
    """Of a key that asks."""

    is_reliable: bool
    is_active: bool = True
    has_other_workers: bool = False
    has_other_active_workers: bool = False
    is_full: bool = False
    """Whether it holds all the leases that it may."""


BEST = {is_reliable: Kind(is_reliable) for is_reliable in (False, True)}
"""No limit on shares of a step holds for a key that is active and alone."""
FULL = {is_reliable: Kind(is_reliable, is_full=True) for is_reliable in (False, True)}
"""A key with all the leases that it may have gets none, whatever the others do."""


KINDS = {flags: Kind(*flags) for flags in itertools.product((False, True), repeat=4)}
"""Of a key that may have another lease, by its flags."""


def best_placed(held_versions: Sequence[int], kind: Kind) -> leases.KeyView:
    """No key of this kind with these versions has more reasons to get work, but for one that was drawn for a late slot."""
    return leases.KeyView(
        is_active=kind.is_active,
        held_versions=held_versions,
        leases_held=1 if kind.is_full else 0,
        leases_allowed=1,
        slots_of_step=0,
        is_reliable=kind.is_reliable,
    )


NAMELESS = {kind: best_placed((), kind) for kind in itertools.starmap(Kind, itertools.product((False, True), repeat=5))}
"""For limits that do not follow from versions."""


Frame = tuple[int, int, float]
"""Step, number of versions, and how long a version takes to settle: nothing but counts changes without one of them or time."""
Heard = dict[tuple[int, ...], leases.Refused | None]


@dataclass(slots=True)
class CommonView:
    """What all keys share between two changes."""

    swarm: leases.SwarmView
    """Without other workers, and with nobody who asks."""
    revision: int
    observed: object
    until: float
    frame: Frame = (0, 0, 0.0)
    outlooks: dict[Kind, int] = field(default_factory=dict)
    """What the rule looks at, numbered by `Refusals`."""
    place: int = -1
    """The part of it that is the same for all kinds."""
    seen: dict[tuple[bool, bool], leases.SwarmView] = field(default_factory=dict)
    """The swarm as keys with such others see it."""
    loads: dict[str, leases.StepLoad | None] = field(default_factory=dict)
    """The load of the step for keys that are not reliable, and for those that are, and of the next step for these; none if no
    group of theirs is wanted."""
    to_best: tuple[Heard, Heard] = field(default_factory=lambda: ({}, {}))
    """What the best-placed key hears, by whether it is reliable and by its versions, once somebody asked."""

    def seen_by(self, kind: Kind) -> leases.SwarmView:
        others = kind[2:4]
        if others not in self.seen:
            self.seen[others] = self.swarm._replace(
                has_other_workers=kind.has_other_workers, has_other_active_workers=kind.has_other_active_workers
            )
        return self.seen[others]

    def holds(self, revision: int, observed: object, now: float) -> bool:
        return revision == self.revision and observed is self.observed and now < self.until


class Refusals:
    def __init__(self, training: TrainingConfig, trust: TrustConfig) -> None:
        self.training, self.trust = training, trust
        self._numbers = itertools.count()
        self._places: dict[object, int] = {}
        self._answers: dict[tuple[int, tuple[int, ...]], leases.Refused | None] = {}
        """To a key that asks alone: others that ask make its wait longer, and change nothing else."""

    def get(self, view: CommonView, kind: Kind, held_versions: tuple[int, ...]) -> leases.Refused | None:
        """What every key of this kind hears, but for its wait among others; none if one of them may get work."""
        outlook = view.outlooks.get(kind)
        if outlook is None:
            outlook = view.outlooks[kind] = self._outlook(view, kind)
        asked = (outlook, held_versions)
        try:
            return self._answers[asked]
        except KeyError:
            if len(self._answers) >= KEPT:
                self._answers.clear()
            answer = self._answers[asked] = self._decide(view, kind, held_versions)
            return answer

    def _outlook(self, view: CommonView, kind: Kind) -> int:
        """A number for all that `leases.decide` looks at when such a key asks."""
        if view.place < 0:
            view.place = self._place(view.swarm)
        return 4 * view.place + 2 * self._has_work(view, kind) + self._has_work_ahead(view, kind)

    def _has_work(self, view: CommonView, kind: Kind) -> bool:
        """`leases.has_work` for the best-placed key of a kind: kinds differ in the others that the load names, and in trust."""
        name = "reliable" if kind.is_reliable else "deferred"
        return self._may_lease(self._known_load(view, name, kind.is_reliable, lambda: view.swarm), kind)

    def _has_work_ahead(self, view: CommonView, kind: Kind) -> bool:
        """`leases.has_work_ahead`, in the same way."""
        if view.swarm.ahead is None or not kind.is_reliable:
            return False
        if self._known_load(view, "reliable", True, lambda: view.swarm) is not None:
            return False
        following = self._known_load(view, "ahead", True, lambda: leases.next_step(view.swarm, self.training))
        return self._may_lease(following, kind)

    def _may_lease(self, load: leases.StepLoad | None, kind: Kind) -> bool:
        if load is None or kind.is_full:
            return False
        return leases.may_lease(leases.StepLoad(*load[:4], *kind[2:4]), not kind.is_active, self.trust)

    def _known_load(
        self, view: CommonView, name: str, is_reliable: bool, swarm: Callable[[], leases.SwarmView]
    ) -> leases.StepLoad | None:
        """None if no more groups are wanted from anybody."""
        if name not in view.loads:
            asked = swarm()
            wanted = leases.groups_wanted(asked, self.training, is_reliable=is_reliable)
            view.loads[name] = leases.step_load(asked, NAMELESS[BEST[is_reliable]], wanted) if wanted > 0 else None
        return view.loads[name]

    def _place(self, swarm: leases.SwarmView) -> int:
        place = (
            *(swarm.run_state, swarm.step, swarm.steps, swarm.has_space, tuple(swarm.published)),
            *(swarm.settled_version, swarm.awaited_version),
        )
        if len(self._places) >= KEPT:
            self._places.clear()
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = next(self._numbers)
        return number

    def _decide(self, view: CommonView, kind: Kind, held_versions: Sequence[int]) -> leases.Refused | None:
        answer = leases.decide(view.seen_by(kind), best_placed(held_versions, kind), self.training, self.trust)
        return answer if isinstance(answer, leases.Refused) else None


poll_s = lru_cache(maxsize=1 << 14)(leases.poll_s)
"""The few numbers of keys that ask come again and again."""


def wait_s(refused: leases.Refused, keys_polling: int) -> float:
    """Of a key that asks among others."""
    alone_s, among_others_s = refused.retry_after_s, poll_s(keys_polling)
    return alone_s if alone_s > among_others_s else among_others_s
