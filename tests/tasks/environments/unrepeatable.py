"""Environments that a validator could not replay, each for another reason."""

import os
import random
import time
from typing import Any


class Repeats:
    """The good one that the others spoil."""

    def reset(self, seed: int, **_task: Any) -> str:
        self._rng = random.Random(seed)
        return f"begin {self._rng.random()}"

    def step(self, action: str) -> dict[str, Any]:
        return {"observation": self.observed(action), "done": False, "reward": 0.0}

    def observed(self, action: str) -> str:
        return f"{action} {self._rng.random()}"


class IgnoresSeed(Repeats):
    def reset(self, seed: int, **_task: Any) -> str:
        return super().reset(0)


class GlobalRandom(Repeats):
    def observed(self, action: str) -> str:
        return str(random.random())


class SetOrder(Repeats):
    def observed(self, action: str) -> str:
        return " ".join({f"word {number}" for number in range(20)})


class ReadsClock(Repeats):
    def observed(self, action: str) -> str:
        return f"it is {time.time():.2f}"


class PrintsAddress(Repeats):
    def observed(self, action: str) -> str:
        return repr(self)


class ReadsFolder(Repeats):
    def observed(self, action: str) -> str:
        return os.getcwd()


class PaysForNothing(Repeats):
    def step(self, action: str) -> dict[str, Any]:
        return {"observation": "", "done": True, "reward": 1.0}
