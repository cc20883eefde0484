"""What an environment is: a class with `reset(seed, **task)` and `step(action)`, as OpenEnv has it; nothing is inherited.

`step` answers with an object or mapping that has `observation`, `done` and `reward`; an OpenEnv observation, which is all three at
once, will do. Observations are text or what JSON can say, with sorted keys: nothing whose text differs from process to process
gets through. What cannot be read this way is a failure of the environment, named by kind and never quoted.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.errors import ConfigError

MOST_LETTERS = 1 << 20
"""Of one observation; the limit in tokens is a setting of the environment."""
_NOT_OBSERVED = frozenset({"done", "reward", "metadata"})


class EnvironmentConfigError(ConfigError):
    """An environment that cannot be used in a run."""

    code = "environment"


class FailureError(Exception):
    """What an environment did that ends its episode; `kind` is one of a few fixed sentences."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Answer(NamedTuple):
    observation: str = ""
    done: bool = False
    reward: float = 0.0


def read_answer(value: Any) -> Answer:
    """What `step` returned, or FailureError."""
    fields = _fields(value)
    if "done" not in fields:
        raise FailureError("answered without `done`")
    observed = fields["observation"] if "observation" in fields else _observed(fields)
    return Answer(observation_text(observed), bool(fields["done"]), _reward(fields.get("reward")))


def read_opening(value: Any) -> str:
    """What `reset` returned, as text: nothing, a text, or an answer."""
    if value is None or isinstance(value, str):
        return observation_text(value)
    fields = _fields(value)
    return observation_text(fields["observation"] if "observation" in fields else _observed(fields))


def observation_text(value: Any) -> str:
    """A text as it is, anything else as JSON with sorted keys."""
    text = "" if value is None else value if isinstance(value, str) else _as_json(value)
    if len(text) > MOST_LETTERS:
        raise FailureError(f"answered with more than {MOST_LETTERS} letters")
    try:
        str.encode(text)
    except UnicodeEncodeError:  # half a surrogate pair: no tokenizer takes it
        raise FailureError("answered with text that is not Unicode") from None
    return text


def _as_json(value: Any) -> str:
    plain = _fields(value) if not isinstance(value, list | tuple | int | float | bool) else value
    try:
        return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False, default=_refuse)
    except (TypeError, ValueError, RecursionError):
        raise FailureError("answered with something that JSON cannot say") from None


def _refuse(value: object) -> object:
    if dataclasses.is_dataclass(value) or hasattr(value, "model_dump"):
        return _fields(value)
    raise TypeError


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return dict(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "done") or hasattr(value, "observation"):
        return {name: getattr(value, name) for name in ("observation", "done", "reward") if hasattr(value, name)}
    raise FailureError("answered with an object that has no fields")


def _observed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _NOT_OBSERVED}


def _reward(value: Any) -> float:
    if value is None:
        return 0.0
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise FailureError("answered with a reward that is no number") from None
    if not math.isfinite(reward):
        raise FailureError("answered with a reward that is not finite")
    return reward
