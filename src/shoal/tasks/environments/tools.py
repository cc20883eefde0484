"""Tool calls as JSON in tags, the format of Qwen and Hermes templates: one parser for worker and validator.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, after the thinking, any number of them; they run in the order of the text. A
class whose public methods are tools (the shape of TRL's environments: `reset(**row)`, optional `get_reward`) becomes an environment
here. What a tool raises reaches the policy as the name of the exception: no traceback, path or address.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.tasks.environments.contract import Answer, FailureError, observation_text
from shoal.tasks.verifiers.answers import THINK_CLOSE

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESERVED = frozenset({"reset", "step", "close", "get_reward", "state"})
_JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array", dict: "object"}


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    error: str = ""
    """Why it cannot be run; the policy sees it."""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls of one turn, in the order of the text. A tag that never closes is a call that cannot be run."""
    calls = []
    for piece in text.rpartition(THINK_CLOSE)[2].split(OPEN)[1:]:
        inside, closing, _ = piece.partition(CLOSE)
        calls.append(_call(inside) if closing else _failed("the tool call is not closed"))
    return calls


def _call(text: str) -> ToolCall:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return _failed("the tool call is not JSON")
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return _failed("the tool call has no name")
    arguments = tree.get("arguments", {})
    return ToolCall(tree["name"], arguments) if isinstance(arguments, dict) else _failed("arguments are no object")


def _failed(error: str) -> ToolCall:
    return ToolCall("", {}, error)


def tool_names(kind: type) -> list[str]:
    """Public methods in the order in which the class defines them."""
    members = [name for base in reversed(kind.__mro__[:-1]) for name in vars(base)]
    public = [name for name in dict.fromkeys(members) if not name.startswith("_") and name not in RESERVED]
    return [name for name in public if inspect.isfunction(inspect.getattr_static(kind, name))]


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """As chat templates take it: name, first line of the docstring, parameters by their annotations."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    described = {one.name: {"type": _JSON_TYPES.get(one.annotation, "string")} for one in parameters}
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": (inspect.getdoc(function) or "").partition("\n")[0],
            "parameters": {"type": "object", "properties": described, "required": required},
        },
    }


class ToolEnvironment:
    """A class of tools as an environment: a turn without a call ends the episode and is its answer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._tools = frozenset(tool_names(type(inner)))

    def reset(self, seed: int, **task: Any) -> Any:
        return call_accepted(self._inner.reset, {"seed": seed, **task})

    def step(self, action: str) -> Answer:
        calls = parse_tool_calls(action)
        if not calls:
            return Answer(done=True, reward=self._reward(action))
        return Answer("\n".join(self._run(call) for call in calls))

    def _run(self, call: ToolCall) -> str:
        if call.error:
            return f"error: {call.error}"
        if call.name not in self._tools:
            return f"error: there is no tool of that name; there are {', '.join(sorted(self._tools))}"
        function = getattr(self._inner, call.name)
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError:
            return f"error: {call.name} does not take these arguments"
        try:
            return observation_text(function(**call.arguments))
        except (FailureError, MemoryError):
            raise
        except Exception as error:
            return f"error: {type(error).__name__}"

    def _reward(self, answer: str) -> float:
        reward = getattr(self._inner, "get_reward", None)
        if reward is None:
            return 0.0
        takes_answer = bool(inspect.signature(reward).parameters)
        return float(reward(answer) if takes_answer else reward())


def call_accepted(function: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Calls with those arguments that the function names; with all if it takes any."""
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return function(**(named if takes_any else {name: named[name] for name in named if name in parameters}))
