"""Tasks and rewards: what is asked, in which tokens, and what an answer is worth. Never imports torch."""

from shoal.tasks.codec import CODEC_FILES, TextCodec
from shoal.tasks.model import Task, TaskSet, TaskSets
from shoal.tasks.rewards import length_penalty
from shoal.tasks.sources import load_tasks
from shoal.tasks.verifiers import THINK_CLOSE, THINK_OPEN, Score, is_exact, score

__all__ = [
    "CODEC_FILES",
    "THINK_CLOSE",
    "THINK_OPEN",
    "Score",
    "Task",
    "TaskSet",
    "TaskSets",
    "TextCodec",
    "is_exact",
    "length_penalty",
    "load_tasks",
    "score",
]
