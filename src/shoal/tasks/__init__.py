"""Tasks and rewards: what is asked, in which tokens, and what an answer is worth. Never imports torch."""

from shoal.tasks.answers import THINK_CLOSE, THINK_OPEN
from shoal.tasks.checks import Info, Outcome
from shoal.tasks.codec import CODEC_FILES, PromptStyle, TextCodec
from shoal.tasks.columns import MalformedTaskError, row_to_task
from shoal.tasks.learned import is_learned, verifiable
from shoal.tasks.model import Task, TaskSet, TaskSets
from shoal.tasks.requirements import OwnVerifierError, check_requirements
from shoal.tasks.rewards import length_penalty, score_all
from shoal.tasks.sandbox import SandboxError
from shoal.tasks.sources import load_tasks
from shoal.tasks.verifiers import Score, Verifier, is_exact, register, score, verifier

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
