"""The environment in which episode cheats are tried: what it says depends on its seed, the turn and every letter of the action."""

import random
import zlib
from typing import Any


class World:
    max_turns = 4
    opens = False
    seeded = True
    observation_tokens = 24

    def reset(self, seed: int, **_task: Any) -> None:
        self._rng, self._turns = random.Random(seed), 0

    def step(self, action: str) -> dict[str, Any]:
        self._turns += 1
        drawn = self._rng.randrange(1000)
        heard = zlib.crc32(action.encode()) % 1000
        reward = (drawn + heard) % 3 / 2
        return {"observation": f"{drawn} {heard}", "done": self._turns == 3, "reward": reward}
