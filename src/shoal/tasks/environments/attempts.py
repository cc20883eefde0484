"""The built-in environment `reasoning-gym`: a task of that library, answered in one or more attempts.

After a wrong answer the policy hears that it is wrong, never the right one, and may try again; the score of the last attempt
counts. The library's own scorer runs inside the environment's confined process. Tolerant: some scorers take their time.
"""

import importlib
from typing import Any

from shoal.tasks.environments.contract import Answer
from shoal.tasks.verifiers.answers import answer_part, final_answer

ENOUGH = 1.0 - 1e-9


class GymAttempts:
    replay = "tolerant"
    opens = False
    max_turns = 2
    observation_tokens = 32
    requires = ("reasoning-gym",)

    @staticmethod
    def prepare() -> None:
        """Pays for the imports before the first episode."""
        for name in ("reasoning_gym", "shoal.tasks.verifiers.gym", "shoal.tasks.verifiers.scorer_process"):
            importlib.import_module(name)

    def reset(self, dataset: str, entry: dict[str, Any], attempts: int = 2, **_task: Any) -> None:
        self._dataset, self._entry, self._left = dataset, entry, attempts

    def step(self, action: str) -> Answer:
        reward = self._score(answer_part(action))
        self._left -= 1
        if reward >= ENOUGH or self._left < 1:
            return Answer(done=True, reward=reward)
        return Answer("That is wrong. Try again.")

    def _score(self, answer: str | None) -> float:
        if answer is None:
            return 0.0
        from shoal.tasks.verifiers.gym import tagged_answer
        from shoal.tasks.verifiers.scorer_process import score

        found = (tagged_answer(answer) or final_answer(answer) or answer).strip()
        try:
            return min(1.0, max(0.0, score(self._dataset, self._entry, found)))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # an answer that a scorer cannot read is worth nothing
            return 0.0
