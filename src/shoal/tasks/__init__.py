"""Tasks and rewards: what is asked, in which tokens, and what an answer is worth. Never imports torch."""

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
