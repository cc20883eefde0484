"""The slots that a worker holds, and their samples on the way through its engine.

Samples enter while others run and leave when they end; a slot leaves with its last sample. What is learned on the way, how long
completions are and how fast they end, is what admission decides with. Nothing here speaks to anybody: the loop says which slots
may enter and what becomes of those that have ended.
"""

import time
from collections.abc import Callable

from shoal.metrics import Report, silent
from shoal.policy.engine import Completion, GenerationRequest
from shoal.policy.episodes import EpisodeStream
from shoal.tasks.environments.episodes import Episode
from shoal.tasks.workload import WorkItem
from shoal.worker.admission import Lengths, Rates, slot_s
from shoal.worker.slots import Slot, Version, sampled_tokens


class Generation:
    def __init__(
        self, max_new_tokens: int, *, episode: Callable[[Slot, int], Episode | None], report: Report = silent
    ) -> None:
        """`episode` makes the episode of a sample that meets an environment."""
        self.slots: list[Slot] = []
        self.lengths, self.rates = Lengths(max_new_tokens), Rates()
        self.busy_s = 0.0
        self.stepped_at = 0.0
        """End of the last step, by the monotonic clock."""
        self._max_new_tokens = max_new_tokens
        self._make_episode, self._report = episode, report
        self._slot_of: dict[int, Slot] = {}

    @property
    def waiting(self) -> int:
        """Samples that have not entered."""
        return sum(len(slot.waiting) for slot in self.slots)

    @property
    def running(self) -> int:
        return len(self._slot_of)

    def entering(self, loaded: Version | None, *, may_begin: bool) -> list[Slot]:
        """Slots with samples that may enter now; those that were begun come first."""
        ready = [slot for slot in self.slots if slot.waiting and slot.version == loaded]
        begun = [slot for slot in ready if slot.is_begun]
        return [*begun, *(slot for slot in ready if may_begin and not slot.is_begun)]

    def can_end(self, slot: Slot, now: float) -> bool:
        """Whether a slot that begins now is expected to end before its lease does, by the coordinator's clock."""
        if not self.lengths.is_known:
            return True
        return now + slot_s(slot.items, self.lengths, self.rates.step_s) <= slot.lease.expires_at

    def enter(self, slot: Slot, most: int, stream: EpisodeStream) -> int:
        """Samples of the slot go into the engine; returns how many."""
        entering = slot.enter(most)
        requests = [self._request(slot.items[at]) for at in entering]
        numbers = stream.submit(requests, [self._make_episode(slot, at) for at in entering])
        slot.running.update(zip(numbers, entering, strict=True))
        self._slot_of.update(dict.fromkeys(numbers, slot))
        return len(entering)

    def step(self, stream: EpisodeStream) -> list[Slot]:
        """One step of the engine; returns the slots that are complete, which are held no longer."""
        started = time.monotonic()
        ended = stream.step()
        self.stepped_at = time.monotonic()
        self.busy_s += self.stepped_at - started
        self.rates.stepped(self.stepped_at - started, len(ended))
        return [slot for number, completion in ended if (slot := self._end(number, completion)).is_complete]

    def forget(self, slot: Slot, stream: EpisodeStream) -> None:
        stream.cancel(list(slot.running))
        for number in slot.running:
            del self._slot_of[number]
        self.slots.remove(slot)

    def _end(self, number: int, completion: Completion) -> Slot:
        slot = self._slot_of.pop(number)
        at = slot.running[number]
        self.lengths.observe(slot.items[at].target_length, sampled_tokens(completion))
        if completion.finish_reason == "failed":
            self._report(f"{slot}: {slot.episodes[at].why}")
        slot.end(number, completion)
        if slot.is_complete:
            self.slots.remove(slot)
        return slot

    def _request(self, item: WorkItem) -> GenerationRequest:
        return GenerationRequest(item.prompt_tokens, item.seed, self._max_new_tokens)
