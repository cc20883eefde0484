"""Late slots over tables in memory: the one, if any, for which a key that asks was drawn. `rules.backups` decides."""

import itertools

from shoal.coordinator.rules import backups, leases
from shoal.coordinator.work.leasing import PAGE
from shoal.simulation.memory import slots
from shoal.simulation.memory.observer import Observed, Observer
from shoal.simulation.memory.presence import BeatingPresence
from shoal.simulation.memory.tables import Key, Tables


class LateSlots:
    def __init__(self, tables: Tables, observer: Observer, presence: BeatingPresence, secret: bytes) -> None:
        self.tables, self.observer, self.presence, self.secret = tables, observer, presence, secret
        self.has_backups = True
        """Only a simulation can do without them, to show what they are worth."""

    def is_any(self, now: float) -> bool:
        """Whether a slot of the step may go to another key too."""
        step = self.tables.steps.get(len(self.tables.batches))
        if step is None or not self.has_backups:
            return False
        return bool(step.overdue) or (bool(step.due) and step.due[0][0] <= now)

    def drawn(self, key: Key, observed: Observed, held_versions: tuple[int, ...], now: float) -> leases.OpenSlot | None:
        """Of a reliable key."""
        if not self.is_any(now):
            return None
        poll_s = leases.poll_s(self.presence.polling_at(now, has_delivered=key.delivered_at > 0))
        others = self.observer.reliable_keys(observed, key.numerics_class)
        if not others:
            others = list(itertools.islice(self.presence.workers, PAGE))
        late = slots.late_slots(self.tables.of_step(self.tables.step), now)
        fitting = (one for one in late if one.numerics_class == key.numerics_class and not one.was_held_by(key))
        for slot in itertools.islice(fitting, PAGE):
            if slot.version in held_versions:
                view = backups.LateSlot(slot.step, slot.number, slot.version, slot.attempts, slot.due_at)
                if backups.may_take(view, key.key, others, self.secret, now, poll_s):
                    return leases.OpenSlot(slot.number, slot.version)
        return None
