"""What the slots of a scenario ask for: lengths, rewards and bytes, all from the seed of the slot alone.

So every honest key makes the same samples of a slot, as it does in a run.
"""

import math
import random
from collections import OrderedDict
from dataclasses import dataclass

from shoal.config import ShoalConfig
from shoal.protocol import api
from shoal.simulation.memory.models import made
from shoal.simulation.swarm.links import MBIT
from shoal.simulation.swarm.spec import Work, WorkerSpec

KEPT = 1 << 15
"""Slots whose contents are kept; one is asked for by its worker and by a validator."""


@dataclass(frozen=True, slots=True)
class SlotWork:
    lengths: tuple[int, ...]
    """Tokens of each sample, group by group."""
    groups: tuple[api.GroupVerdict, ...]
    tokens: int


class Workload:
    def __init__(self, spec: Work, config: ShoalConfig) -> None:
        self.spec, self.rollouts = spec, config.rollouts
        self._mu = math.log(spec.median_tokens)
        self._known: OrderedDict[str, SlotWork] = OrderedDict()

    def of(self, slot_seed: str) -> SlotWork:
        known = self._known.get(slot_seed)
        if known is None:
            known = self._known[slot_seed] = self._make(slot_seed)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known

    def _make(self, slot_seed: str) -> SlotWork:
        chance, size = random.Random(slot_seed), self.rollouts.group_size
        longest, spread = self.rollouts.max_new_tokens, self.spec.spread
        draw, mu, samples = chance.lognormvariate, self._mu, size * self.rollouts.tasks_per_slot
        lengths = tuple([max(1, min(longest, round(draw(mu, spread)))) for _ in range(samples)])
        groups = tuple(
            self._group(chance, number, sum(lengths[number * size : (number + 1) * size]))
            for number in range(self.rollouts.tasks_per_slot)
        )
        return SlotWork(lengths, groups, sum(lengths))

    def _group(self, chance: random.Random, number: int, tokens: int) -> api.GroupVerdict:
        return made(
            api.GroupVerdict,
            group=number,
            task_id=f"task-{chance.randrange(100_000)}",
            useful=chance.random() < self.spec.useful_share,
            tokens=tokens,
            rewards=[1.0, 0.0],
            task_rewards=[1.0, 0.0],
            samples=[f"{chance.getrandbits(64):016x}", f"{chance.getrandbits(64):016x}"],
        )

    def audit_tokens(self, work: SlotWork, audited: list[int]) -> float:
        """Tokens that an audit of these groups reads."""
        prompts = len(audited) * self.rollouts.group_size * self.spec.prompt_tokens
        return sum(work.groups[number].tokens for number in audited) + prompts

    def forged(self, slot_seed: str, share: float) -> set[int]:
        """Groups that a key which forges makes up; at least one."""
        chance = random.Random(f"forged {slot_seed}")
        groups = range(self.rollouts.tasks_per_slot)
        return {group for group in groups if chance.random() < share} or {chance.choice(groups)}

    def slot_s(self, worker: WorkerSpec) -> float:
        """What a slot of middle length takes a worker of this class."""
        samples = self.rollouts.tasks_per_slot * self.rollouts.group_size
        rounds = -(-samples // worker.rows)
        return rounds * min(self.spec.median_tokens, self.rollouts.max_new_tokens) * worker.rows / worker.tokens_per_s

    def upload_s(self, worker: WorkerSpec) -> float:
        """What the file of a slot of middle length takes from the last sample to the coordinator."""
        samples = self.rollouts.tasks_per_slot * self.rollouts.group_size
        tokens = samples * min(self.spec.median_tokens, self.rollouts.max_new_tokens)
        return worker.deliver_s + tokens * self.spec.bytes_per_token / (worker.up_mbit_s * MBIT)

    def file_bytes(self, work: SlotWork) -> float:
        return work.tokens * self.spec.bytes_per_token
