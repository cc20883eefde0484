"""Tasks and rewards: what is asked, in which tokens, and what an answer is worth. Never imports torch.

Names are imported when they are first used: the process of an environment needs a few small modules of this package, and starting
it must not cost two seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.tasks.codec import CODEC_FILES, PromptStyle, TextCodec
    from shoal.tasks.datasets.columns import MalformedTaskError, row_to_task
    from shoal.tasks.rewards import length_penalty, score_all
    from shoal.tasks.sandbox.sandbox import SandboxError
    from shoal.tasks.sources import load_tasks
    from shoal.tasks.task import Task, TaskSet, TaskSets
    from shoal.tasks.verifiers.answers import THINK_CLOSE, THINK_OPEN
    from shoal.tasks.verifiers.registry import Score, Verifier, is_exact, register, score, verifier
    from shoal.tasks.verifiers.requirements import OwnVerifierError, check_requirements
    from shoal.tasks.verifiers.reward_models import is_learned, verifiable
    from shoal.tasks.verifiers.text import Info, Outcome

__all__ = [
    "CODEC_FILES",
    "THINK_CLOSE",
    "THINK_OPEN",
    "Info",
    "MalformedTaskError",
    "Outcome",
    "OwnVerifierError",
    "PromptStyle",
    "SandboxError",
    "Score",
    "Task",
    "TaskSet",
    "TaskSets",
    "TextCodec",
    "Verifier",
    "check_requirements",
    "is_exact",
    "is_learned",
    "length_penalty",
    "load_tasks",
    "register",
    "row_to_task",
    "score",
    "score_all",
    "verifiable",
    "verifier",
]

_PLACES = {
    "CODEC_FILES": "shoal.tasks.codec",
    "Info": "shoal.tasks.verifiers.text",
    "MalformedTaskError": "shoal.tasks.datasets.columns",
    "Outcome": "shoal.tasks.verifiers.text",
    "OwnVerifierError": "shoal.tasks.verifiers.requirements",
    "PromptStyle": "shoal.tasks.codec",
    "SandboxError": "shoal.tasks.sandbox.sandbox",
    "Score": "shoal.tasks.verifiers.registry",
    "THINK_CLOSE": "shoal.tasks.verifiers.answers",
    "THINK_OPEN": "shoal.tasks.verifiers.answers",
    "Task": "shoal.tasks.task",
    "TaskSet": "shoal.tasks.task",
    "TaskSets": "shoal.tasks.task",
    "TextCodec": "shoal.tasks.codec",
    "Verifier": "shoal.tasks.verifiers.registry",
    "check_requirements": "shoal.tasks.verifiers.requirements",
    "is_exact": "shoal.tasks.verifiers.registry",
    "is_learned": "shoal.tasks.verifiers.reward_models",
    "length_penalty": "shoal.tasks.rewards",
    "load_tasks": "shoal.tasks.sources",
    "register": "shoal.tasks.verifiers.registry",
    "row_to_task": "shoal.tasks.datasets.columns",
    "score": "shoal.tasks.verifiers.registry",
    "score_all": "shoal.tasks.rewards",
    "verifiable": "shoal.tasks.verifiers.reward_models",
    "verifier": "shoal.tasks.verifiers.registry",
}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_PLACES[name]), name)
    globals()[name] = found
    return found
