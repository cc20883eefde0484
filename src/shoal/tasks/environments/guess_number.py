"""The built-in environment `guess-number`: the policy guesses a number and hears whether it is larger or smaller.

The number follows from the seed of the episode; `reset` says its range. A right guess earns 1, and the episode ends; an episode
without one earns nothing.
"""

import random
import re
from typing import Any

from shoal.tasks.environments.contract import Answer
from shoal.tasks.verifiers.answers import THINK_CLOSE

_NUMBER = re.compile(r"-?[0-9]{1,9}")


class GuessNumber:
    replay = "exact"
    max_turns = 8
    turn_tokens = 32
    observation_tokens = 32

    def reset(self, seed: int, low: int = 1, high: int = 100, **_task: Any) -> str:
        self._number = random.Random(seed).randint(low, high)
        return f"The number is between {low} and {high}."

    def step(self, action: str) -> Answer:
        numbers = _NUMBER.findall(action.rpartition(THINK_CLOSE)[2])
        if not numbers:
            return Answer("That is no number. Guess again.")
        guess = int(numbers[-1])
        if guess == self._number:
            return Answer("Right.", done=True, reward=1.0)
        return Answer(f"{'Larger' if guess < self._number else 'Smaller'} than {guess}. Guess again.")
