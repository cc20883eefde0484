"""A worker of a simulated swarm: an engine with rows, a link, and a machine that comes and goes.

Rows are equally fast, and a sample keeps its row until it ends, so a slot ends with its longest sample in line. The worker asks for
the next lease when a row is free; once newer weights are here it lets the engine run empty, swaps, and asks again. Weights are
fetched in the background, the newest version at a time.
"""

import heapq
import math
import random
from functools import partial

from shoal.errors import RefusedError
from shoal.files import digest_bytes
from shoal.protocol import api
from shoal.simulation.swarm.links import MBIT
from shoal.simulation.swarm.world import World

ASKS_AGAIN_S = 0.25
START_S = 1.0
"""Workers begin within this time."""


class Member:
    def __init__(self, world: World, group: int, number: int) -> None:
        self.world, self.clock, self.group, self.spec = world, world.clock, group, world.spec.workers[group]
        name = f"{self.spec.name}-{number}"
        self.chance = random.Random(f"{world.spec.run.seed} {name}")
        speed = math.exp(self.chance.gauss(0.0, self.spec.speed_spread)) if self.spec.speed_spread else 1.0
        self.token_s = self.spec.rows / (self.spec.tokens_per_s * speed)
        self.key = digest_bytes(name.encode())
        self.rows = [0.0] * self.spec.rows
        self.busy_until = self.accounted_to = world.clock.now
        self.session, self.is_present, self.is_out = 0, False, False
        self.first_lease_at: float | None = None
        self.waits_for = "need_weights"
        self.held: tuple[int, ...] = ()
        self.loaded = -1
        self._fetching: tuple[int, float, int] | None = None
        self._looked_at = world.clock.now
        self._requests, self._name = 0, f"{self.key[:16]}-"
        self._asks, self._requested = partial(self.ask, 0), partial(self.request, 0)
        """Of this session; an idle worker plans them again and again."""
        self.clock.after(self.chance.random() * START_S, self._join)

    # Coming and going

    def _join(self) -> None:
        self.world.coordinator.register(self.key, self.spec.tokens_per_s)
        self._begin_session()

    def _begin_session(self) -> None:
        now = self.clock.now
        self.world.keys[self.key] = None
        self.is_present, self.session = True, self.session + 1
        self.rows = [now] * self.spec.rows
        self.busy_until = self.accounted_to = self._looked_at = now
        self.loaded = -1
        self._asks, self._requested = partial(self.ask, self.session), partial(self.request, self.session)
        if self._fetching is not None:  # shards that have arrived are kept
            version, left_s, size_bytes = self._fetching
            self._fetching = (version, now + left_s, size_bytes)
        if self.spec.stays_s:
            self.clock.after(self.chance.expovariate(1 / self.spec.stays_s), self._leave)
        self.ask(self.session)

    def _leave(self) -> None:
        if self.is_out:
            return
        self.settle()
        self._refresh(self.clock.now)
        if self._fetching is not None:
            version, done_at, size_bytes = self._fetching
            self._fetching = (version, done_at - self.clock.now, size_bytes)
        self.is_present, self.session = False, self.session + 1
        self.world.keys.pop(self.key, None)
        self.world.coordinator.leave(self.key)
        self.clock.after(self.chance.expovariate(1 / self.spec.away_s), self._return)

    def _return(self) -> None:
        if self.is_out:
            return
        try:
            self.world.coordinator.rejoin(self.key)
        except RefusedError:  # a verdict has banned it meanwhile
            self._banned()
        else:
            self._begin_session()

    def _banned(self) -> None:
        self.settle()
        self.is_out, self.is_present = True, False
        self.session += 1
        self.world.keys.pop(self.key, None)
        if self.first_lease_at is not None:
            self.world.banned_after_s[self.key] = self.clock.now - self.first_lease_at

    # Weights

    def _refresh(self, now: float) -> None:
        """What was fetched since the last look."""
        while True:
            if self._fetching is not None:
                version, done_at, size_bytes = self._fetching
                if done_at > now:
                    return
                self._take(version, size_bytes)
                self._looked_at, self._fetching = done_at, None
            published = self.world.published_at
            newest = len(published) - 1
            while newest > 0 and published[newest] > self._looked_at:
                newest -= 1
            if self.held and newest <= self.held[-1]:
                newest = self.held[-1] + 1
            if newest >= len(published):
                return
            self._fetch(newest, max(published[newest], self._looked_at))

    def _fetch(self, version: int, begins_at: float) -> None:
        held = self.held[-1] if self.held else None
        seconds = self.world.broadcast.seconds(self.group, version, held)
        self._fetching = (version, begins_at + seconds, self.world.broadcast.plans.fetch_bytes(version, held))

    def _take(self, version: int, size_bytes: int) -> None:
        self.world.counted.bytes["worker_down"] += size_bytes
        self.held = (*self.held, version)[-self.world.config.training.async_level - 2 :]

    def _arrives_at(self) -> float:
        return self._fetching[1] if self._fetching is not None else math.inf

    # Work

    def ask(self, session: int) -> None:
        if session != self.session:
            return
        now = self.clock.now
        if self.has_news():
            self._refresh(now)
        if not self.held:
            self.waits_for = "need_weights"
            self._ask_at(self._arrives_at())
        elif self.held[-1] > self.loaded and self.busy_until > now:
            self._ask_at(self.busy_until)
        elif self.held[-1] > self.loaded:
            self.loaded = self.held[-1]
            self._ask_at(now + self.spec.swap_s)
        else:
            self.world.request(self._requested)

    def has_news(self) -> bool:
        """Whether it has anything to do before it asks for work: a version that arrived, or can be fetched or loaded."""
        held, fetching = self.held, self._fetching
        if not held or held[-1] > self.loaded:
            return True
        if fetching is None:
            return held[-1] + 1 < len(self.world.published_at)
        return fetching[1] <= self.clock.now

    def ask_at(self, at: float) -> None:
        """At a time that is not over."""
        self.clock.at(at, self._asks)

    def _ask_at(self, at: float) -> None:
        if at < math.inf:
            self.clock.after(at - self.clock.now, self._asks)
        else:  # no version is published yet
            self.clock.after(ASKS_AGAIN_S, self._asks)

    def usable(self) -> tuple[int, ...]:
        """While there is other work, no lease of an older version is worth two swaps of weights."""
        held = self.held
        if held[0] >= self.loaded or (self.waits_for and self.busy_until <= self.clock.now):
            return held
        return tuple([one for one in held if one >= self.loaded])

    def request(self, session: int) -> None:
        if session != self.session:
            return
        try:
            answer = self.world.coordinator.lease(self.key, f"{self._name}{self._requests:08}", self.usable())
        except RefusedError:
            self._banned()
            return
        if answer.lease is not None:
            self._begin(answer.lease)
            return
        self.refused(answer.reason, answer.retry_after_s)

    def refused(self, reason: str, retry_after_s: float) -> None:
        """Asks again after this time."""
        now, self._requests = self.clock.now, self._requests + 1
        if reason != self.waits_for:  # what it waited for until now
            self._account(now)
            self.waits_for = reason
        if reason == "need_weights" and self._fetching is not None:
            retry_after_s = min(retry_after_s, max(0.0, self._fetching[1] - now))
        self.world.park(self, now + retry_after_s)

    def _begin(self, lease: api.Lease) -> None:
        now, self._requests = self.clock.now, self._requests + 1
        if self.first_lease_at is None:
            self.first_lease_at = now
        self.world.opened_at.setdefault(lease.step, now)
        if self.spec.conduct == "stall":
            self._ask_at(now + ASKS_AGAIN_S)
            return
        begins_at = now
        if lease.policy_version != self.loaded:
            begins_at, self.loaded = max(now, self.busy_until) + self.spec.swap_s, lease.policy_version
        self._account(begins_at)
        ends_at = self._sample(lease, begins_at)
        self.waits_for = ""
        work = self.world.workload.of(lease.slot_seed)
        sent_s = self.spec.deliver_s + self.world.workload.file_bytes(work) / (self.spec.up_mbit_s * MBIT)
        self.clock.after(ends_at + sent_s - now, partial(self._deliver, lease, self.session))
        self._ask_at(max(now, self.rows[0] if self.spec.continuous else ends_at))

    def _sample(self, lease: api.Lease, begins_at: float) -> float:
        """Puts the samples of a slot into rows; returns when the last one ends."""
        work, rows, ends_at = self.world.workload.of(lease.slot_seed), self.rows, begins_at
        for length in work.lengths:
            ends = max(begins_at, rows[0]) + length * self.token_s
            heapq.heapreplace(rows, ends)
            ends_at = max(ends, ends_at)
        self.busy_until = max(self.busy_until, ends_at)
        self.world.counted.busy_s[self.group] += work.tokens * self.token_s
        self.world.counted.tokens["generated"] += work.tokens
        return ends_at

    def _deliver(self, lease: api.Lease, session: int) -> None:
        if session != self.session:
            self.world.counted.tokens["lost"] += self.world.workload.of(lease.slot_seed).tokens
        else:
            self.world.request(partial(self._submit, lease))

    def _submit(self, lease: api.Lease) -> None:
        work, world = self.world.workload.of(lease.slot_seed), self.world
        if self.spec.conduct == "junk":
            world.junk.add(lease.lease_id)
        elif self.spec.conduct == "forge":
            world.forged[lease.lease_id] = world.workload.forged(lease.slot_seed, self.spec.forged_share)
        try:
            world.coordinator.submit(self.key, lease.lease_id, lease.lease_id.encode())
        except RefusedError as refusal:
            world.counted.tokens["late"] += work.tokens
            if refusal.code == "banned":
                self._banned()
            return
        world.received_at[lease.lease_id] = self.clock.now
        world.filed_at.setdefault(lease.step, self.clock.now)
        world.counted.files[self.group] += 1
        world.counted.bytes["worker_up"] += round(world.workload.file_bytes(work))
        world.on_file()

    # What is counted

    def _account(self, until: float) -> None:
        idle_s = until - max(self.busy_until, self.accounted_to)
        if idle_s > 0:
            self.world.counted.idle_s[self.group, self.waits_for or "lease"] += idle_s
        self.world.counted.present_s[self.group] += max(0.0, until - self.accounted_to)
        self.accounted_to = max(self.accounted_to, until)

    def settle(self) -> None:
        """Counts the time until now."""
        if self.is_present:
            self._account(self.clock.now)
