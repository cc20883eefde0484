"""Idle workers of a simulated swarm: they were refused, and ask again after a wait.

Nearly all requests of a large swarm are theirs, and nearly all are refused for a reason that holds for every key of a kind. So an
idle worker is parked here instead of having an event for each request: between two other events the requests that fall due are
answered in one loop. Each still has its own time, its place in the coordinator's line and its part in the count of keys that ask.
A request that could be answered with work, or that needs a look at the key, leaves the loop and is decided as any other.
"""

import heapq
from collections import deque
from typing import TYPE_CHECKING

from shoal.simulation.clock import Event
from shoal.simulation.memory.coordinator import MemoryCoordinator
from shoal.simulation.swarm.world import World

if TYPE_CHECKING:
    from shoal.simulation.swarm.members import Member

Turn = tuple[float, int, "Member", int]
"""When, the number of the event, who, and in which of its sessions."""
LINES = 3
"""One for each of the few waits that nearly all idle workers hear at a time."""


class Idle:
    def __init__(self, world: World, coordinator: MemoryCoordinator) -> None:
        self.world, self.clock, self.coordinator = world, world.clock, coordinator
        self._lines: tuple[deque[Turn], ...] = tuple(deque() for _ in range(LINES))
        """Requests, each line in the order of time; ..."""
        self._others: list[Turn] = []
        """... those that fit in no line, as a heap."""
        self._answers: deque[Turn] = deque()

    def park(self, member: "Member", at: float) -> None:
        """The worker asks again at this time."""
        turn = (at, self.clock.number(), member, member.session)
        for line in self._lines:
            if not line or line[-1][0] <= at:
                line.append(turn)
                return
        heapq.heappush(self._others, turn)

    def play(self, first: Event | None, end: float, most: float) -> int:
        clock, world, lines, others, answers = self.clock, self.world, self._lines, self._others, self._answers
        number, happened = clock.number, 0
        while happened < most:
            source: deque[Turn] | None = answers
            turn: Turn | None = answers[0] if answers else None
            for line in lines:
                if line and (turn is None or line[0] < turn):
                    turn, source = line[0], line
            if others and (turn is None or others[0] < turn):
                turn, source = others[0], None
            if turn is None or turn[0] > end:
                break
            # No two events have the same number: what stands behind it is never compared.
            if first is not None and first < turn:  # type: ignore[operator]
                break
            if source is None:
                heapq.heappop(others)
            else:
                source.popleft()
            at, _, member, session = turn
            clock.now, happened = at, happened + 1
            if session != member.session:
                continue
            if source is not answers:
                if member.has_news():
                    member.ask(session)
                    break
                if world.service_s:
                    answers.append((world.answered_at(), number(), member, session))
                    continue
                world.counted.requests += 1
            refusal = self.coordinator.refuse(member.key, member.usable(), at)
            if refusal is None:
                member.request(session)  # it may plan something
                break
            member.refused(*refusal)
        return happened
