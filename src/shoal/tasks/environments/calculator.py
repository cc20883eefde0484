"""The built-in environment `calculator`: a problem whose answer is an integer, and a tool that adds and subtracts.

In the shape of TRL's environment classes: public methods are tools. A turn without a call earns 1 if what
follows the thinking is the answer, as the verifier `integer_answer` has it.
"""

import re
from typing import Any

from shoal.tasks.verifiers.answers import answer_part

_SUM = re.compile(r"[+-]?[0-9]{1,9}(?:[+-][0-9]{1,9}){0,15}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,32}")
_TERM = re.compile(r"[+-]?[0-9]+")


class Calculator:
    replay = "exact"
    role = "tool"
    opens = False
    max_turns = 4
    observation_tokens = 24

    def reset(self, answer: int, **_task: Any) -> None:
        self._answer = answer

    def calculate(self, expression: str) -> str:
        """The value of a sum such as 47+38-19."""
        text = str(expression).replace(" ", "")
        if not _SUM.fullmatch(text):
            return "error: not a sum of integers"
        return str(sum(map(int, _TERM.findall(text))))

    def get_reward(self, answer: str) -> float:
        found = (answer_part(answer) or "").strip()
        return float(bool(_INTEGER.fullmatch(found)) and int(found) == self._answer)
